"""`/v1/completions` through the official client: what comes back is what the engine gives in this process."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI

from tandem import LLM, SamplingParams
from tests.python.serve.server_process import ServerProcess

pytestmark = pytest.mark.slow

BASE: dict[str, Any] = {"temperature": 0.9, "seed": 5, "max_tokens": 8, "ignore_eos": True}

# For each field, a value that changes what BASE gives.
FIELDS: dict[str, Any] = {
    "temperature": 0,
    "top_p": 0.2,
    "top_k": 1,
    "min_p": 1.0,
    "repetition_penalty": 30.0,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
    "logit_bias": {"70": 100},
    "seed": 6,
    "stop_token_ids": list(range(6, 300)),
    "max_tokens": 2,
}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> OpenAI:
    return server.client()


def create(client: OpenAI, prompt: Any, **fields: Any) -> Any:
    """A completion; fields that OpenAI does not have travel in the body all the same."""
    return client.completions.create(model="tiny", prompt=prompt, extra_body=fields)


def engine_params(fields: dict[str, Any]) -> SamplingParams:
    bias = {int(k): float(v) for k, v in fields.get("logit_bias", {}).items()}
    return SamplingParams(**(fields | {"logit_bias": bias}))


@pytest.mark.parametrize("name", FIELDS)
def test_every_sampling_field_reaches_the_sampler(client: OpenAI, llm: LLM, name: str) -> None:
    # A penalty changes nothing before a token comes twice, so its text is longer and its temperature higher.
    long = {"max_tokens": 60, "temperature": 2.0} if "penalty" in name else {}
    base = BASE | long
    changed = base | {name: FIELDS[name]}
    expected = llm.generate("hello", engine_params(changed))[0]
    without = llm.generate("hello", engine_params(base))[0]
    assert expected.token_ids != without.token_ids, "the value chosen changes nothing, so it tests nothing"
    completion = create(client, "hello", **changed, logprobs=0)
    assert completion.choices[0].text == expected.text
    assert completion.usage.completion_tokens == expected.completion_tokens
    assert [choice.finish_reason for choice in completion.choices] == [expected.finish_reason]


def test_stop_strings_cut_the_text_and_are_named(client: OpenAI, llm: LLM) -> None:
    text = llm.generate("hello", engine_params(BASE | {"max_tokens": 40}))[0].text
    stop = next(char for char in text if char.isascii())
    completion = create(client, "hello", **(BASE | {"max_tokens": 40}), stop=[stop, "never"])
    assert completion.choices[0].text == text.partition(stop)[0]
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].model_extra["stop_reason"] == stop
    kept = create(client, "hello", **(BASE | {"max_tokens": 40}), stop=stop, include_stop_str_in_output=True)
    assert kept.choices[0].text == text.partition(stop)[0] + stop


def test_an_end_token_ends_unless_it_is_ignored_or_comes_too_early(client: OpenAI, llm: LLM) -> None:
    end = llm.tokenizer.token_id("[e~[")
    wanted = {"temperature": 0, "logit_bias": {str(end): 100}, "max_tokens": 4}
    assert create(client, "hello", **wanted).usage.completion_tokens == 1
    assert create(client, "hello", **wanted, ignore_eos=True).usage.completion_tokens == 4
    assert create(client, "hello", **wanted, min_tokens=3).usage.completion_tokens == 4


def test_special_tokens_are_shown_on_request(client: OpenAI, llm: LLM) -> None:
    pad = llm.tokenizer.token_id("[pad]")
    wanted = {"temperature": 0, "logit_bias": {str(pad): 100}, "max_tokens": 2}
    assert create(client, "hello", **wanted).choices[0].text == ""
    assert create(client, "hello", **wanted, skip_special_tokens=False).choices[0].text == "[pad][pad]"


def test_prompts_are_texts_or_ids_or_lists_of_them(client: OpenAI, llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    other = llm.tokenizer.encode("world!")
    params = engine_params(BASE)
    hello, world = (output.text for output in llm.generate(["hello", "world!"], params))
    assert create(client, ids, **BASE).choices[0].text == hello
    assert [c.text for c in create(client, ["hello", "world!"], **BASE).choices] == [hello, world]
    lists = create(client, [ids, other], **BASE)
    assert [c.text for c in lists.choices] == [hello, world]
    assert lists.usage.prompt_tokens == len(ids) + len(other)


def test_choices_differ_by_their_seeds(client: OpenAI, llm: LLM) -> None:
    completion = create(client, ["hello", "world!"], **BASE, n=3)
    expected = [
        llm.generate(prompt, engine_params(BASE | {"seed": BASE["seed"] + i}))[0].text
        for prompt in ("hello", "world!")
        for i in range(3)
    ]
    assert [choice.text for choice in completion.choices] == expected
    assert len(set(expected)) == 6
    assert [choice.index for choice in completion.choices] == list(range(6))
    assert completion.usage.completion_tokens == 48
    assert completion.usage.prompt_tokens == 11


def test_a_negative_seed_is_one_of_its_own(client: OpenAI, llm: LLM) -> None:
    text = create(client, "hello", **(BASE | {"seed": -1})).choices[0].text
    assert text == llm.generate("hello", engine_params(BASE | {"seed": 2**64 - 1}))[0].text


def test_a_stream_adds_up_to_the_whole_answer(client: OpenAI) -> None:
    whole = create(client, ["hello", "world!"], **BASE, n=2)
    stream = client.completions.create(
        model="tiny",
        prompt=["hello", "world!"],
        stream=True,
        stream_options={"include_usage": True},
        extra_body=BASE | {"n": 2},
    )
    chunks = list(stream)
    texts = dict.fromkeys(range(4), "")
    reasons: dict[int, str | None] = {}
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        for choice in chunk.choices:
            assert choice.index not in reasons, "a piece after the end"
            texts[choice.index] += choice.text
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_the_option_has_no_usage(server: ServerProcess) -> None:
    events = server.events("/v1/completions", {"model": "tiny", "prompt": "hello", **BASE})
    assert events[-1] == "[DONE]"
    assert all("usage" not in event for event in events[:-1])


def test_logprobs_are_those_of_the_engine_streamed_or_not(client: OpenAI, llm: LLM) -> None:
    expected = llm.generate("hello", engine_params(BASE | {"logprobs": 2}))[0].logprobs
    assert expected is not None
    logprobs = create(client, "hello", **BASE, logprobs=2).choices[0].logprobs
    assert logprobs.token_logprobs == pytest.approx([entry.logprob for entry in expected], abs=1e-6)
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 8
    assert [max(top.values()) for top in logprobs.top_logprobs] == pytest.approx(
        [entry.top[0][1] for entry in expected], abs=1e-6
    )
    streamed: list[float] = []
    for chunk in client.completions.create(
        model="tiny", prompt="hello", stream=True, extra_body=BASE | {"logprobs": 2}
    ):
        for choice in chunk.choices:
            streamed += [] if choice.logprobs is None else choice.logprobs.token_logprobs
    assert streamed == logprobs.token_logprobs


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echo_gives_the_prompt_and_its_logprobs(client: OpenAI, llm: LLM, max_tokens: int) -> None:
    params = engine_params(BASE | {"max_tokens": max(1, max_tokens), "prompt_logprobs": 1, "logprobs": 1})
    expected = llm.generate("hello", params)[0]
    fields = BASE | {"max_tokens": max_tokens, "echo": True, "logprobs": 1}
    for _ in range(2):  # the second time the prompt would be found in the cache
        completion = create(client, "hello", **fields)
        choice = completion.choices[0]
        assert choice.text == "hello" + (expected.text if max_tokens else "")
        assert completion.usage.completion_tokens == max_tokens
        assert choice.finish_reason == "length"
        of_prompt = [None if entry is None else entry.logprob for entry in expected.prompt_logprobs or []]
        of_text = [entry.logprob for entry in expected.logprobs or []][:max_tokens]
        assert choice.logprobs.token_logprobs == [None] + [pytest.approx(v, abs=1e-6) for v in of_prompt[1:] + of_text]
        assert choice.logprobs.tokens[:5] == list("hello")
        assert choice.logprobs.text_offset[:5] == [0, 1, 2, 3, 4]
        assert choice.logprobs.top_logprobs[0] is None


def test_an_echo_streams_the_prompt_first(server: ServerProcess, llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    events = server.events("/v1/completions", {"model": "tiny", "prompt": ids, "echo": True, **BASE})
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert text == "hello" + llm.generate("hello", engine_params(BASE))[0].text
    asked = {"model": "tiny", "prompt": "hello", "echo": True, "max_tokens": 0}
    *only, last, _ = server.events("/v1/completions", asked | {"stream_options": {"include_usage": True}})
    assert [event["choices"][0]["text"] for event in only] == ["hello"]
    assert last["usage"]["completion_tokens"] == 0


def test_cached_tokens_are_told_and_a_salt_keeps_caches_apart(client: OpenAI) -> None:
    prompt = "a prompt that nobody else has, of 41 bytes"
    fields = {"max_tokens": 1, "temperature": 0}

    def cached(**more: Any) -> int:
        return int(create(client, prompt, **fields, **more).usage.prompt_tokens_details.cached_tokens)

    assert cached() == 0
    assert cached() == len(prompt) // 4 * 4
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") == len(prompt) // 4 * 4
    assert cached(n=2) == len(prompt) // 4 * 4, "each prompt counts once, as in prompt_tokens"


def test_a_prompt_too_long_is_refused_with_both_numbers(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        create(client, "x" * 256, **BASE)
    assert "256 tokens" in str(caught.value)
    assert "at most 255" in str(caught.value)
    assert caught.value.param == "prompt"
    assert caught.value.code == "context_length_exceeded"
    assert create(client, "x" * 255, **BASE).usage.completion_tokens == 1


def test_many_requests_at_once_through_the_async_client_each_get_their_own_text(
    server: ServerProcess, llm: LLM
) -> None:
    prompts = [f"prompt number {i} " * (1 + i % 3) for i in range(10)]
    expected = [llm.generate(prompt, engine_params(BASE | {"seed": i}))[0].text for i, prompt in enumerate(prompts)]

    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:

            async def one(i: int) -> str:
                # A name that all requests share is nobody's name here.
                common: dict[str, Any] = {"model": "tiny", "prompt": prompts[i], "extra_headers": {"x-request-id": "1"}}
                common["extra_body"] = BASE | {"seed": i}
                if i % 2:
                    return (await client.completions.create(**common)).choices[0].text
                stream = await client.completions.create(**common, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return list(await asyncio.gather(*(one(i) for i in range(len(prompts)))))

    assert asyncio.run(run()) == expected


def test_a_priority_changes_the_order_and_no_text(server: ServerProcess, client: OpenAI) -> None:
    short = BASE | {"max_tokens": 12}
    expected = create(client, "hello", **short).choices[0].text
    urgent, patient = short | {"priority": -3}, short | {"priority": 3}
    ends: list[str] = []

    def run(name: str, fields: dict[str, Any]) -> None:
        completion = create(client, "hello", **fields)
        ends.append(name)
        assert name == "long" or completion.choices[0].text == expected

    def waiting() -> int:
        return int(server.get("/v1/stats").json["waiting"])

    # Eight have seats, so the others wait for the one that ends early, and take its seat one after the other.
    with ThreadPoolExecutor(12) as threads:
        futures = [threads.submit(run, "long", BASE | {"max_tokens": 245 if i else 190}) for i in range(8)]
        server.wait_until(lambda: server.get("/v1/stats").json["running"] == 8, 10)
        for count, (name, fields) in enumerate([("patient", patient), ("urgent", urgent)] * 2, start=1):
            futures.append(threads.submit(run, name, fields))
            server.wait_until(lambda count=count: waiting() >= count, 10)
        for future in futures:
            future.result()
    assert [name for name in ends if name != "long"] == ["urgent", "urgent", "patient", "patient"]
