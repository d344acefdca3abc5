"""Mixed traffic on a pool too small for it: every answer is, token by token, the one that the request gets alone."""

import random
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tandem import LLM, SamplingParams, demo
from tandem.serve.token_logprobs import CompletionLogprobs
from tests.python.serve.server_process import ServerProcess, serve_model
from tests.python.serve.test_traffic import cancel, memory_of, open_stream, reset

pytestmark = pytest.mark.slow

NUM_CLIENTS = 16
# Room for little more than one sequence of full length; eight run at once.
TINY_POOL = ("--max-tokens-per-step", "32", "--kv-cache-bytes", "900000")
DEMO_MODEL_LEN = 512
DEMO_POOL = ("--max-tokens-per-step", "128", "--max-model-len", str(DEMO_MODEL_LEN), "--kv-cache-bytes", "40000000")
# Many replies outgrow the page that they begin in, which makes others lose their seats.
TINY_LENGTHS, DEMO_LENGTHS = (1, 5, 20, 60), (1, 20, 150, 250)
STEMS = ["a stem that many requests share, long enough for several pages ", "another stem ", ""]
KINDS = ["cancelled"] * 3 + ["streamed"] * 7 + ["whole"] * 7


@dataclass(frozen=True)
class Case:
    """A request and its only right answer; ``tokens`` are named as in the answer's logprobs."""

    body: dict[str, Any]
    text: str
    tokens: list[str]


@dataclass
class Seen:
    """What the clients saw; filled by all of their threads.

    ``ended`` are the whole answers, by the places of their requests in the order of sending. The overtakers of a
    stream are those that were sent after it and ended before it began.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    num_sent: int = 0
    ended: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    num_overtakers: list[int] = field(default_factory=list)


def texts_for_tiny(rng: random.Random, count: int) -> list[str]:
    return [rng.choice(STEMS) + f"and number {i}" * rng.choice([1, 1, 2, 8]) for i in range(count)]


def word_problems(rng: random.Random, count: int) -> list[str]:
    """Some of them behind others, which many have before them."""
    questions = [problem.question for problem in demo.held_out_word_problems()]
    stems = ["", " ".join(questions[:3]) + " ", " ".join(questions[3:5]) + " "]
    return [rng.choice(stems) + question for question in rng.sample(questions[5:], count)]


def cases(llm: LLM, name: str, prompts: list[str], lengths: Sequence[int], rng: random.Random) -> list[Case]:
    made = []
    for i, prompt in enumerate(prompts):
        fields = {"max_tokens": rng.choice(lengths), "temperature": rng.choice([0, 1.0]), "seed": i}
        output = llm.generate(prompt, SamplingParams(**fields, ignore_eos=True))[0]
        tokens = CompletionLogprobs(llm.tokenizer).render(output.token_ids, [])["tokens"]
        made.append(Case({"model": name, "prompt": prompt, "ignore_eos": True} | fields, output.text, tokens))
    return made


def run(server: ServerProcess, client: OpenAI, seen: Seen, case: Case, kind: str, num_bytes: int) -> None:
    """One client's request; fails where its answer is not the right one."""
    with seen.lock:
        place = seen.num_sent
        seen.num_sent += 1
    if kind == "cancelled":
        with open_stream(server, case.body, connection="close") as connection:
            while num_bytes > 0 and (part := connection.recv(num_bytes)):
                num_bytes -= len(part)
            reset(connection)
        return
    if kind == "streamed":
        check_stream(client, seen, case, place)
    else:
        # Every other without log-probabilities, which change how a row is sampled.
        wanted = {"logprobs": 0} if num_bytes % 2 else {}
        answer = server.post("/v1/completions", case.body | wanted)
        assert answer.status == 200, answer.body
        choice = answer.json["choices"][0]
        assert choice["text"] == case.text
        assert answer.json["usage"]["completion_tokens"] == len(case.tokens)
        if wanted:
            assert choice["logprobs"]["tokens"] == case.tokens
        with seen.lock:
            seen.ids.append(answer.json["id"])
    with seen.lock:
        seen.ended.append(place)


def check_stream(client: OpenAI, seen: Seen, case: Case, place: int) -> None:
    start = time.monotonic()
    text, tokens, reasons, ids = "", list[str](), list[str](), set[str]()
    fields = {name: value for name, value in case.body.items() if name not in ("model", "prompt")}
    stream = client.completions.create(
        model=case.body["model"], prompt=case.body["prompt"], stream=True, extra_body=fields | {"logprobs": 0}
    )
    for chunk in stream:
        if not ids:
            with seen.lock:
                seen.first_token_s.append(time.monotonic() - start)
                seen.num_overtakers.append(sum(other > place for other in seen.ended))
        ids.add(chunk.id)
        choice = chunk.choices[0]
        text += choice.text
        tokens += [] if choice.logprobs is None else choice.logprobs.tokens
        reasons += [] if choice.finish_reason is None else [choice.finish_reason]
    assert (text, tokens, reasons) == (case.text, case.tokens, ["length"])
    with seen.lock:
        seen.ids += ids


def drained(server: ServerProcess, ended: threading.Event) -> list[dict[str, Any]]:
    """The statistics again and again, with the records of the steps since the time before."""
    found = []
    while not ended.wait(0.05):
        found.append(server.request("POST", "/v1/stats").json)
    return [*found, server.request("POST", "/v1/stats").json]


def check_records(all_stats: list[dict[str, Any]]) -> None:
    """Each step has been drained once, and the records add up to the counters."""
    records = [record for stats in all_stats for record in stats["window"]["records"]]
    last = all_stats[-1]
    assert [record["step"] for record in records] == list(range(1, last["steps"] + 1))
    assert sum(stats["window"]["num_dropped"] for stats in all_stats) == 0
    assert sum(record["num_generated"] for record in records) == last["generated_tokens"]
    for part in ("launch", "wait"):
        assert sum(record[f"{part}_s"] for record in records) == pytest.approx(last["step_seconds"][part])


@pytest.mark.parametrize("model", ["tiny", pytest.param("demo", marks=pytest.mark.soak)])
def test_nothing_is_lost_mixed_up_or_held_under_mixed_traffic(
    model: str, folder: Path, py_rng: random.Random, soak: bool
) -> None:
    if model == "tiny":
        source, pool, texts_of, lengths, most = str(folder), TINY_POOL, texts_for_tiny, TINY_LENGTHS, None
    else:
        source, pool, texts_of, lengths, most = "demo", DEMO_POOL, word_problems, DEMO_LENGTHS, DEMO_MODEL_LEN
    with LLM(source, num_threads=1, max_model_len=most) as llm:
        every = cases(llm, model, texts_of(py_rng, 60 if soak else 16), lengths, py_rng)
    num_requests = 80 if not soak else 4000 if model == "tiny" else 400
    plan = [(py_rng.choice(every), py_rng.choice(KINDS), py_rng.randrange(3000)) for _ in range(num_requests)]
    seen, ended = Seen(), threading.Event()
    with serve_model(source, "--max-seats", "8", *pool) as server, ThreadPoolExecutor(NUM_CLIENTS + 1) as threads:
        before = server.get("/v1/stats").json["submitted"]
        watch = threads.submit(drained, server, ended)
        client, memory = server.client(), list[int]()
        try:
            for part in (plan[: num_requests // 2], plan[num_requests // 2 :]):
                for future in [threads.submit(run, server, client, seen, *item) for item in part]:
                    future.result()
                server.wait_until(lambda: not (s := server.get("/v1/stats").json)["running"] and not s["waiting"], 30)
                memory.append(memory_of(server))
        finally:
            ended.set()
        every_stats = watch.result()
    check_records(every_stats)
    stats, pages = every_stats[-1], [stats["pages"] for stats in every_stats]
    assert sum(stats["finished"].values()) == stats["submitted"] == before + num_requests
    num_let_end = sum(kind != "cancelled" for _, kind, _ in plan)
    assert len(set(seen.ids)) == len(seen.ids) == num_let_end <= stats["finished"]["length"]
    assert stats["finished"]["error"] == stats["finished"]["stop"] == 0
    assert stats["finished"]["abort"] > 0
    assert stats["pages"]["held"] == stats["pages"]["leased"] == 0
    assert stats["pages"]["free"] + stats["pages"]["cached"] == stats["pages"]["total"]
    assert stats["preemptions"] > 0, "the pool was never too small"
    assert stats["cached_tokens"] > 0, "nothing was ever found cached"
    # The tiny model's drafter is random: some of thousands of its drafts are right, and of a few none may be.
    assert all(sum(route["drafted"]) > 0 for route in stats["rounds"].values())
    assert max(p["held"] / p["total"] for p in pages) >= 0.95
    assert statistics.median(1 - p["free"] / p["total"] for p in pages) >= 0.95
    # Whoever comes first begins first.
    first, last = statistics.median(seen.first_token_s), max(seen.first_token_s)
    print(f"first tokens after {first:.2f} s, at most {last:.2f} s; {max(seen.num_overtakers)} overtakers at most")
    print(f"memory grew by {memory[1] - memory[0]:,} bytes in the second half")
    assert max(seen.num_overtakers) <= 2 * NUM_CLIENTS
    if soak:
        assert all(0 < sum(route["accepted"]) < sum(route["drafted"]) for route in stats["rounds"].values())
        assert max(seen.first_token_s) < 60
        assert memory[1] - memory[0] < 16 * 2**20


@pytest.mark.soak
def test_drafting_requests_cancelled_at_random_points_leave_nothing_behind(py_rng: random.Random) -> None:
    prompts = word_problems(py_rng, 500)
    with LLM("demo", num_threads=1, max_model_len=DEMO_MODEL_LEN) as llm:
        checked = cases(llm, "demo", prompts[:5], DEMO_LENGTHS, py_rng)
    bodies = [{"model": "demo", "prompt": p, "max_tokens": 100, "ignore_eos": True} for p in prompts]
    with serve_model("demo", "--max-seats", "8", *DEMO_POOL) as server:
        # The first time fills what has a bound: the tapes of passes, the records of steps, the heap's arenas.
        cancel(server, bodies, 2.0, py_rng)
        memory = memory_of(server)
        cancel(server, bodies, 2.0, py_rng)
        growth = memory_of(server) - memory
        print(f"memory grew by {growth:,} bytes when all was asked for again")
        assert growth < 16 * 2**20
        stats = server.get("/v1/stats").json
        assert stats["pages"]["free"] + stats["pages"]["cached"] == stats["pages"]["total"]
        assert stats["finished"]["abort"] > 500
        assert sum(sum(route["accepted"]) for route in stats["rounds"].values()) > 500
        for case in checked:
            answer = server.post("/v1/completions", case.body | {"logprobs": 0}).json["choices"][0]
            assert (answer["text"], answer["logprobs"]["tokens"]) == (case.text, case.tokens)
