"""The class that users hold: batches, streams, threads, errors."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem import LLM, SamplingParams
from tandem.engine.errors import (
    EngineClosedError,
    InvalidChatError,
    InvalidParameterError,
    InvalidPromptError,
    InvalidTokenIdError,
    PoolTooSmallError,
)
from tandem.msa import AttentionBackend
from tests.python.engine.checkpoint import VOCAB_SIZE, make_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, max_tokens=6, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, num_threads=1, max_seats=4, max_tokens_per_step=16) as llm:
        yield llm


def test_outputs_stand_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt {i} " * (1 + i % 4) for i in range(9)]
    outputs = llm.generate(prompts, [GREEDY, SEEDED, GREEDY] * 3)
    assert [output.prompt for output in outputs] == prompts
    for i, output in enumerate(outputs):
        alone = llm.generate(prompts[i], [GREEDY, SEEDED, GREEDY][i % 3])[0]
        assert (output.token_ids, output.text) == (alone.token_ids, alone.text)
        assert output.prompt_tokens == len(prompts[i])


def test_a_prompt_may_be_a_list_of_ids(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    by_ids, by_text = llm.generate([ids, "hello"], GREEDY)
    assert llm.generate(ids, GREEDY)[0].token_ids == by_ids.token_ids == by_text.token_ids
    assert (by_ids.prompt, by_text.prompt) == (None, "hello")


def test_streamed_pieces_add_up_to_the_text(llm: LLM) -> None:
    deltas = list(llm.stream("hello", SEEDED))
    output = deltas[-1].output
    assert output is not None
    assert "".join(delta.text for delta in deltas) == output.text
    assert [token for delta in deltas for token in delta.token_ids] == output.token_ids
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert output.token_ids == llm.generate("hello", SEEDED)[0].token_ids


def test_a_dropped_stream_ends_its_request(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(max_tokens=None, ignore_eos=True))
    next(stream)
    stream.close()
    llm.generate("x", GREEDY)
    assert llm.stats().scheduler.num_running == 0


def test_a_request_is_aborted_from_another_thread(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(max_tokens=None, ignore_eos=True))
    first = next(stream)
    thread = threading.Thread(target=llm.abort, args=(first.request_id,))
    thread.start()
    *_, last = stream
    thread.join()
    assert last.finish_reason in ("abort", "length")


def test_many_threads_share_one_model(llm: LLM) -> None:
    expected = [llm.generate(f"thread {i}", GREEDY)[0].token_ids for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda i: llm.generate(f"thread {i}", GREEDY)[0].token_ids, range(8)))
    assert outputs == expected


def test_conversations_use_the_chat_form(llm: LLM) -> None:
    turns = [{"role": "user", "content": "hi"}]
    output = llm.chat(turns, GREEDY, thinking_mode="disabled")[0]
    assert llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False) == (
        "]~!b[]~b]user\nhi[e~[\n]~b]ai\n</mm:think>"
    )
    assert [o.token_ids for o in llm.chat([turns, turns], GREEDY, thinking_mode="disabled")] == [output.token_ids] * 2
    with pytest.raises(InvalidChatError):
        llm.chat([], GREEDY)


def test_one_bad_prompt_of_many_is_refused_before_anything_runs(llm: LLM) -> None:
    before = llm.stats().scheduler.num_submitted
    for bad in ("", [0, VOCAB_SIZE], [5] * 256):
        with pytest.raises(InvalidPromptError):
            llm.generate(["fine", bad], GREEDY)
    with pytest.raises(InvalidTokenIdError):
        llm.generate("fine", SamplingParams(stop_token_ids=[VOCAB_SIZE]))
    with pytest.raises(InvalidParameterError, match="params"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(InvalidPromptError):
        llm.stream("")
    for no_prompts in ([[1, 2.5]], ["fine", 5], [5, "fine"], np.array([5, 6]), [True]):
        with pytest.raises(InvalidPromptError, match="integer"):
            llm.generate(no_prompts, GREEDY)  # type: ignore[arg-type]
    assert llm.stats().scheduler.num_submitted == before


def test_the_second_time_a_prompt_is_cached(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = "0123456789abcdef"
    assert [llm.generate(prompt, GREEDY)[0].cached_tokens for _ in range(2)] == [0, 16]
    llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY)[0].cached_tokens == 0


def test_statistics_count(llm: LLM) -> None:
    before = llm.stats()
    llm.generate(["a", "b"], GREEDY)
    after = llm.stats()
    assert after.scheduler.num_generated_tokens - before.scheduler.num_generated_tokens == 12
    assert after.num_steps > before.num_steps
    assert after.ledger.held == 0
    assert after.times.model > before.times.model


def test_timings_are_in_order(llm: LLM) -> None:
    timings = llm.generate("hello", GREEDY)[0].timings
    assert timings.scheduled is not None
    assert timings.first_token is not None
    assert 0 <= timings.scheduled <= timings.first_token <= timings.total


def test_a_seed_of_the_engine_repeats_unseeded_requests(folder: Path) -> None:
    params = SamplingParams(max_tokens=6)
    texts = []
    for seed in (1, 1, 2):
        with LLM(folder, num_threads=1, seed=seed) as llm:
            texts.append([output.token_ids for output in llm.generate(["a", "b"], params)])
    assert texts[0] == texts[1] != texts[2]


def test_the_reference_backend_gives_the_same_tokens(folder: Path, llm: LLM) -> None:
    with LLM(folder, backend="reference", num_threads=1) as reference:
        assert reference.generate("hello", GREEDY)[0].token_ids == llm.generate("hello", GREEDY)[0].token_ids


@pytest.mark.parametrize("kv_dtype", [None, "float32"])
def test_bf16_runs(folder: Path, kv_dtype: str | None) -> None:
    with LLM(folder, dtype="bfloat16", kv_dtype=kv_dtype, num_threads=1) as llm:
        assert llm.generate("hello", GREEDY)[0].completion_tokens == 6


def test_a_failing_step_is_an_outcome_and_the_next_request_runs(folder: Path) -> None:
    class Failing:
        def __init__(self) -> None:
            self.fail = False

        def wrap(self, backend: AttentionBackend) -> AttentionBackend:
            attend = backend.attend

            def failing(*arguments: object) -> torch.Tensor:
                if self.fail:
                    raise RuntimeError("no scratch")
                return attend(*arguments)

            backend.attend = failing
            return backend

    failing = Failing()
    with LLM(folder, num_threads=1, wrap_attention=failing.wrap) as llm:
        good = llm.generate("hello", GREEDY)[0]
        failing.fail = True
        bad = llm.generate("hello", GREEDY)[0]
        failing.fail = False
        assert (bad.finish_reason, bad.error) == ("error", "RuntimeError: no scratch")
        assert llm.generate("hello", GREEDY)[0].token_ids == good.token_ids


def test_a_closed_model_refuses_and_can_be_closed_again(folder: Path) -> None:
    llm = LLM(folder, num_threads=1)
    stream = llm.stream("hello", SamplingParams(max_tokens=None, ignore_eos=True))
    next(stream)
    dropped = llm.stream("hello", SamplingParams(max_tokens=None, ignore_eos=True))
    next(dropped)
    llm.close()
    llm.close()
    *_, last = stream
    assert last.finish_reason in ("abort", "length")
    llm.abort(0)
    dropped.close()
    for call in (lambda: llm.generate("x"), llm.stats):
        with pytest.raises(EngineClosedError):
            call()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "int8"}, InvalidParameterError, "dtype='int8'"),
        ({"kv_dtype": "fp4"}, InvalidParameterError, "kv_dtype"),
        ({"backend": "tpu"}, InvalidParameterError, "backend"),
        ({"num_threads": 0}, InvalidParameterError, "num_threads"),
        ({"max_model_len": 1 << 20}, InvalidParameterError, "256 positions"),
        ({"kv_cache_bytes": 5000}, PoolTooSmallError, "5,000 bytes"),
    ],
)
def test_bad_options_are_refused_by_name(
    folder: Path, options: dict[str, object], error: type[ValueError], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(folder, **options)
