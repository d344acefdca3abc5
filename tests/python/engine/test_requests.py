"""Requests end where they should, and say so: ends, stops, limits, bad input, errors; over a scripted model."""

import dataclasses
import math

import pytest

from tandem.engine.errors import EngineClosedError, InvalidPromptError, InvalidTokenIdError
from tandem.engine.outputs import LOWEST_LOGPROB
from tandem.engine.params import SamplingParams
from tests.python.engine.byte_tokenizer import byte_ids, byte_tokenizer
from tests.python.engine.scripted import VOCAB_SIZE, Rig, ScriptedModel, expected, make_rig, script

TOKENIZER = byte_tokenizer()
GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPT = [10, 11, 12, 13, 14]
END = 3


def text_rig(text: bytes, prompt: bytes = b"go", **options: object) -> Rig:
    """Emits ``text`` byte by byte, then the end token."""
    model = ScriptedModel(script(byte_ids(prompt), [*byte_ids(text), END]))
    return make_rig(model, tokenizer=TOKENIZER, end_ids=[END], **options)


def greedy(**changes: object) -> SamplingParams:
    return SamplingParams(temperature=0, **{"max_tokens": 40, **changes})


def test_the_end_token_ends_the_request_and_is_its_last_id() -> None:
    output = text_rig(b"hello").generate(byte_ids(b"go"), greedy())
    assert (output.text, output.finish_reason, output.stop_reason) == ("hello", "stop", END)
    assert output.token_ids == [*byte_ids(b"hello"), END]
    assert (output.prompt_tokens, output.completion_tokens) == (2, 6)


def test_ignoring_the_end_token_runs_to_the_limit() -> None:
    output = text_rig(b"hi").generate(byte_ids(b"go"), greedy(ignore_eos=True, max_tokens=5))
    assert output.finish_reason == "length"
    assert output.token_ids == [*byte_ids(b"hi"), END, *byte_ids(b"hh")]


def test_a_stop_id_ends_the_request_and_its_text_is_left_out_unless_asked_for() -> None:
    stop = byte_ids(b"i")
    output = text_rig(b"white").generate(byte_ids(b"go"), greedy(stop_token_ids=stop))
    assert (output.text, output.token_ids, output.stop_reason) == ("wh", byte_ids(b"whi"), stop[0])
    kept = text_rig(b"white").generate(byte_ids(b"go"), greedy(stop_token_ids=stop, include_stop_str_in_output=True))
    assert kept.text == "whi"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "kept", "text"),
    [("DEFGHIJ", b"ABCDEFGHIJ", "ABC"), ("DE", b"ABCDE", "ABC"), ("J", b"ABCDEFGHIJ", "ABCDEFGHI")],
)
def test_a_stop_string_cuts_text_and_tokens_alike_streamed_or_not(
    stop: str, kept: bytes, text: str, stream: bool
) -> None:
    rig = text_rig(b"ABCDEFGHIJKLM")
    collector = rig.submit(byte_ids(b"go"), greedy(stop=stop, logprobs=0), stream=stream)
    rig.run()
    output = collector.output
    assert (output.text, output.stop_reason, output.token_ids) == (text, stop, byte_ids(kept))
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    assert "".join(delta.text for delta in collector.deltas) == text
    assert [i for delta in collector.deltas for i in delta.token_ids] == (
        output.token_ids if stream else [output.token_ids[-1]]
    )


@pytest.mark.parametrize("limit", [None, 5])
def test_text_held_back_for_a_stop_string_is_delivered_at_the_end(limit: int | None) -> None:
    rig = text_rig(b"ABDEF")
    collector = rig.submit(byte_ids(b"go"), greedy(stop="DEFX", max_tokens=limit), stream=True)
    rig.run()
    assert "".join(delta.text for delta in collector.deltas) == collector.output.text == "ABDEF"
    assert collector.output.finish_reason == ("stop" if limit is None else "length")


def test_a_stop_string_may_be_kept_in_the_text() -> None:
    output = text_rig(b"one.two").generate(byte_ids(b"go"), greedy(stop=".", include_stop_str_in_output=True))
    assert output.text == "one."


def test_stop_strings_count_inside_the_reasoning_too() -> None:
    model = ScriptedModel(script(byte_ids(b"go"), TOKENIZER.encode("<mm:think>a.b</mm:think>c.d[e~[")))
    rig = make_rig(model, tokenizer=TOKENIZER, end_ids=[END])
    assert rig.generate(byte_ids(b"go"), greedy(stop=".")).text == "<mm:think>a"


def test_streamed_text_holds_whole_characters_only() -> None:
    rig = text_rig("aé😀b".encode())
    collector = rig.submit(byte_ids(b"go"), greedy(), stream=True)
    rig.run()
    assert [delta.text for delta in collector.deltas if delta.text] == ["a", "é", "😀", "b"]


def test_a_character_that_the_limit_cuts_is_left_out_of_the_text_but_its_tokens_count() -> None:
    output = text_rig("a😀".encode()).generate(byte_ids(b"go"), greedy(max_tokens=3))
    assert (output.text, output.completion_tokens) == ("a", 3)


def test_no_text_of_the_prompt_is_repeated() -> None:
    emoji = "😀".encode()
    prompt = b"Hi " + emoji[:3]
    output = text_rig(emoji[3:] + b"x", prompt=prompt).generate(byte_ids(prompt), greedy())
    assert output.text == "😀x"


def test_without_detokenising_there_is_no_text() -> None:
    output = text_rig(b"hello").generate(byte_ids(b"go"), greedy(detokenize=False))
    assert (output.text, output.completion_tokens) == ("", 6)


def test_special_tokens_are_shown_on_request() -> None:
    output = text_rig(b"hi").generate(byte_ids(b"go"), greedy(ignore_eos=True, max_tokens=3, skip_special_tokens=False))
    assert output.text == "hi[e~["
    hidden = text_rig(b"hi").generate(byte_ids(b"go"), greedy(ignore_eos=True, max_tokens=3))
    assert hidden.text == "hi"


def test_before_min_tokens_nothing_ends_the_request() -> None:
    """The masked end token gives way to the second choice, and a stop string that ends too early does not count."""
    free = text_rig(b"ab").generate(byte_ids(b"go"), greedy())
    assert free.token_ids == [*byte_ids(b"ab"), END]
    held = text_rig(b"ab").generate(byte_ids(b"go"), greedy(min_tokens=6, max_tokens=8))
    assert held.token_ids[:3] == [*byte_ids(b"ab"), END + 1]
    assert held.completion_tokens >= 6
    early = text_rig(b"xyxyxyxy").generate(byte_ids(b"go"), greedy(stop="xy", min_tokens=3))
    assert (early.text, early.token_ids) == ("xy", byte_ids(b"xyxy"))


def test_an_output_never_grows_beyond_the_models_limit() -> None:
    rig = make_rig(max_model_len=12)
    output = rig.generate(PROMPT, greedy(max_tokens=None))
    assert (output.finish_reason, output.completion_tokens) == ("length", 7)
    assert output.token_ids == expected(PROMPT, 7)
    assert rig.generate(PROMPT, greedy(max_tokens=100)).completion_tokens == 7


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**31])
def test_ids_outside_the_vocabulary_are_refused_and_neighbours_do_not_notice(token_id: int) -> None:
    rig = make_rig()
    neighbour = rig.submit(PROMPT, GREEDY)
    rig.engine.step()
    for prompt, params in (
        ([5, token_id], GREEDY),
        (PROMPT, dataclasses.replace(GREEDY, logit_bias={token_id: 1.0})),
        (PROMPT, dataclasses.replace(GREEDY, stop_token_ids=[token_id])),
    ):
        with pytest.raises(InvalidTokenIdError, match=str(token_id)):
            rig.submit(prompt, params)
    rig.run()
    assert neighbour.output.token_ids == expected(PROMPT, 8)


def test_prompts_that_cannot_run_are_refused_with_both_numbers() -> None:
    rig = make_rig(max_model_len=12)
    with pytest.raises(InvalidPromptError, match="empty"):
        rig.submit([], GREEDY)
    with pytest.raises(InvalidPromptError, match=r"12 tokens.*at most 11.*max_model_len is 12"):
        rig.submit([7] * 12, GREEDY)
    assert rig.generate([7] * 11, GREEDY).completion_tokens == 1


def test_a_request_that_the_pool_can_never_hold_is_refused_and_the_next_one_served() -> None:
    rig = make_rig(num_slots=5, tokens_per_page=4)
    with pytest.raises(InvalidPromptError, match=r"at most 19.*the pool holds 20 tokens"):
        rig.submit([7] * 32, GREEDY)
    alone = rig.generate(PROMPT, greedy(max_tokens=100))
    assert (alone.finish_reason, alone.token_ids) == ("length", expected(PROMPT, 15))
    assert rig.generate(PROMPT, GREEDY).token_ids == expected(PROMPT, 8)
    rig.check_idle()


def test_logits_that_are_not_finite_end_their_request_alone() -> None:
    rig = make_rig()
    rig.model.nan_prefixes.add((*PROMPT, *expected(PROMPT, 3)))
    other = [20, 21, 22]
    bad, good = rig.submit(PROMPT, GREEDY), rig.submit(other, GREEDY)
    rig.run()
    assert (bad.output.finish_reason, bad.output.error) == ("error", "the logits are not finite")
    assert bad.output.token_ids == expected(PROMPT, 3)
    assert good.output.token_ids == expected(other, 8)
    rig.check_idle()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_raises_fails_its_rows_and_the_loop_goes_on(overlap: bool) -> None:
    rig = make_rig(overlap=overlap)
    rig.faults.half_way.add(1)
    first, second = rig.submit(PROMPT, GREEDY), rig.submit([20, 21], GREEDY)
    rig.run()
    for collector in (first, second):
        assert collector.output.finish_reason == "error"
        assert collector.output.error == "RuntimeError: injected in the model"
        assert collector.output.completion_tokens == 1
    assert rig.generate(PROMPT, GREEDY).token_ids == expected(PROMPT, 8)
    rig.check_idle()


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_that_were_not_in_a_failed_step_go_on(overlap: bool) -> None:
    rig = make_rig(max_seats=1, overlap=overlap)
    rig.faults.before.add(1)
    running, waiting = rig.submit(PROMPT, GREEDY), rig.submit([20, 21], GREEDY)
    rig.run()
    assert running.output.finish_reason == "error"
    assert waiting.output.token_ids == expected([20, 21], 8)


def test_an_aborted_request_keeps_what_it_had() -> None:
    rig = make_rig()
    collector = rig.submit(PROMPT, GREEDY)
    for _ in range(3):
        rig.engine.step()
    rig.engine.abort(collector.output.request_id if collector.done else 0)
    rig.run()
    assert (collector.output.finish_reason, collector.output.token_ids) == ("abort", expected(PROMPT, 3))
    rig.engine.abort(0)
    rig.run()
    rig.check_idle()


def test_a_request_may_be_aborted_before_its_first_step() -> None:
    rig = make_rig()
    collector = rig.submit(PROMPT, GREEDY)
    rig.engine.abort(0)
    rig.run()
    assert (collector.output.finish_reason, collector.output.token_ids) == ("abort", [])


def test_closing_ends_every_request_once_and_refuses_new_ones() -> None:
    rig = make_rig()
    running, queued = rig.submit(PROMPT, GREEDY), None
    rig.engine.step()
    queued = rig.submit(PROMPT, GREEDY)
    rig.engine.close()
    rig.engine.close()
    assert running.output.finish_reason == "abort"
    assert queued.output.finish_reason == "abort"
    with pytest.raises(EngineClosedError):
        rig.submit(PROMPT, GREEDY)
    rig.engine.abort(0)


def test_a_thousand_one_token_requests_leave_every_seat_free() -> None:
    rig = make_rig(max_seats=3, num_slots=40)
    long = rig.submit([50, 51], greedy(max_tokens=100))
    for batch in range(100):
        collectors = [rig.submit([6 + batch, 7 + i], greedy(max_tokens=1)) for i in range(10)]
        while not all(collector.done for collector in collectors):
            assert rig.engine.step()
        assert all(collector.output.completion_tokens == 1 for collector in collectors)
        if long.done:
            assert long.output.token_ids == expected([50, 51], 100)
            long = rig.submit([50, 51], greedy(max_tokens=100))
    rig.run()
    rig.check_idle()


def test_logprobs_of_minus_infinity_are_numbers() -> None:
    rig = make_rig(ScriptedModel(certain=True))
    output = rig.generate(PROMPT, greedy(max_tokens=2, logprobs=5))
    assert output.logprobs is not None
    for entry in output.logprobs:
        assert len(entry.top) == 5
        assert all(math.isfinite(value) and value >= LOWEST_LOGPROB for _, value in entry.top)
        assert entry.top[-1][1] == LOWEST_LOGPROB


def test_log_probabilities_are_those_of_the_raw_logits_and_each_request_gets_its_own_number() -> None:
    rig = make_rig()
    wants = [rig.submit(PROMPT, greedy(max_tokens=3, logprobs=n, logit_bias={9: 100.0})) for n in (0, 1, 3)]
    none = rig.submit(PROMPT, greedy(max_tokens=3))
    rig.run()
    norm = math.log(math.exp(8) + math.exp(4) + VOCAB_SIZE - 2)
    for n, collector in zip((0, 1, 3), wants, strict=True):
        entries = collector.output.logprobs
        assert entries is not None
        assert [len(entry.top) for entry in entries] == [n] * 3
        assert entries[0].token_id == 9
        assert entries[0].logprob == pytest.approx(-norm, abs=1e-4)
        if n:
            assert entries[0].top[0] == (expected(PROMPT, 1)[0], pytest.approx(8 - norm, abs=1e-4))
    assert none.output.logprobs is None


def test_prompt_logprobs_do_not_depend_on_what_is_cached() -> None:
    prompt = list(range(20, 33))
    rig = make_rig(max_tokens_per_step=5)
    params = greedy(max_tokens=1, prompt_logprobs=2)
    first = rig.generate(prompt, params)
    rig.generate(prompt, greedy())
    second = rig.generate(prompt, params)
    assert first.prompt_logprobs == second.prompt_logprobs
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    entries = first.prompt_logprobs[1:]
    assert [entry.token_id for entry in entries if entry is not None] == prompt[1:]
    for length, entry in enumerate(entries, start=1):
        assert entry is not None
        assert entry.top[0][0] == expected(prompt[:length], 1)[0]
