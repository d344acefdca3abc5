"""Mixed traffic on a pool too small for it: every answer is the one that the same request gets alone."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tandem import LLM, SamplingParams
from tests.python.serve.server_process import ServerProcess, serve_model
from tests.python.serve.test_traffic import open_stream, reset

pytestmark = pytest.mark.slow

# Room for little more than one sequence of full length; eight run at once.
POOL_BYTES = 900_000
STEMS = ["a stem that many requests share, long enough for several pages ", "another stem ", ""]


@dataclass(frozen=True)
class Case:
    """A request and its only right answer."""

    body: dict[str, Any]
    text: str
    num_tokens: int


def cases(llm: LLM, rng: random.Random, count: int) -> list[Case]:
    made = []
    for i in range(count):
        prompt = rng.choice(STEMS) + f"and number {i}" * rng.choice([1, 1, 2, 8])
        fields = {"max_tokens": rng.choice([1, 5, 20, 60]), "temperature": rng.choice([0, 1.0]), "seed": i}
        output = llm.generate(prompt, SamplingParams(**fields, ignore_eos=True))[0]
        body = {"model": "tiny", "prompt": prompt, "ignore_eos": True} | fields
        made.append(Case(body, output.text, output.completion_tokens))
    return made


def run(server: ServerProcess, case: Case, cancel: bool, stream: bool) -> bool:
    """Whether the request was let end; fails where its answer is not the right one."""
    if cancel:
        connection = open_stream(server, case.body)
        connection.recv(100)
        reset(connection)
        return False
    if stream:
        events = server.events("/v1/completions", case.body)
        assert events[-1] == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == case.text
        return True
    answer = server.post("/v1/completions", case.body)
    assert answer.status == 200, answer.body
    assert answer.json["choices"][0]["text"] == case.text
    assert answer.json["usage"]["completion_tokens"] == case.num_tokens
    return True


def test_nothing_is_lost_mixed_up_or_held_under_mixed_traffic(
    folder: Path, llm: LLM, py_rng: random.Random, soak: bool
) -> None:
    every = cases(llm, py_rng, 60 if soak else 16)
    plan = [(py_rng.choice(every), py_rng.random() < 0.15, py_rng.random() < 0.5) for _ in range(4000 if soak else 80)]
    limits = ["--max-seats", "8", "--max-tokens-per-step", "32", "--kv-cache-bytes", str(POOL_BYTES)]
    with serve_model(folder, *limits) as server:
        total = server.get("/v1/stats").json["submitted"]
        with ThreadPoolExecutor(16) as pool:
            ended = list(pool.map(lambda item: run(server, *item), plan))
        server.wait_until(lambda: not (s := server.get("/v1/stats").json)["running"] and not s["waiting"], 30)
        stats = server.get("/v1/stats").json
        assert sum(stats["finished"].values()) == stats["submitted"] == total + len(plan)
        assert stats["finished"]["length"] >= sum(ended)
        assert stats["finished"]["error"] == stats["pages"]["held"] == 0
        assert stats["pages"]["free"] + stats["pages"]["cached"] == stats["pages"]["total"]
        assert stats["preemptions"] > 0, "the pool was never too small"
        assert stats["cached_tokens"] > 0, "nothing was ever found cached"
