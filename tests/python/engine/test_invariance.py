"""The same request gives the same tokens whatever happens around it: over a scripted model that sees every stale
page.
"""

import dataclasses
import random
from dataclasses import dataclass, field

import pytest

from tandem.engine.outputs import RequestOutput
from tandem.engine.params import SamplingParams
from tests.python.engine.byte_tokenizer import byte_tokenizer
from tests.python.engine.scripted import VOCAB_SIZE, Collector, Rig, ScriptedModel, expected, make_rig

TOKENIZER = byte_tokenizer()
PROMPT = [100 + 7 * i % 150 for i in range(24)]


def greedy(max_tokens: int = 8, **changes: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **changes)


@pytest.mark.parametrize("tokens_per_page", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("overlap", [False, True])
def test_every_hit_length_and_chunk_size_gives_the_tokens_of_a_cold_run(tokens_per_page: int, overlap: bool) -> None:
    cold = expected(PROMPT, 6)
    for hit in range(0, len(PROMPT) + 1, tokens_per_page):
        for chunk in (1, 2, 3, 4, 5, 7, 8, 11, 23, 24, 25):
            rig = make_rig(tokens_per_page=tokens_per_page, max_tokens_per_step=chunk, overlap=overlap)
            if hit > 0:
                rig.generate([*PROMPT[:hit], 299], greedy(1))
            before = rig.model.num_tokens
            output = rig.generate(PROMPT, greedy(6))
            assert output.token_ids == cold, f"hit {hit}, chunk {chunk}"
            assert output.cached_tokens == hit
            computed = len(PROMPT) - hit + 5 if hit < len(PROMPT) else 1 + 5
            # A hit runs its last cached token again, for the hidden state that the cache does not hold.
            assert computed <= rig.model.num_tokens - before <= computed + 1 + int(overlap)


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4, 5])
def test_prompts_of_any_number_of_chunks_leave_the_pool_whole(num_chunks: int) -> None:
    rig = make_rig(max_tokens_per_step=5)
    prompt = PROMPT[: 5 * num_chunks - 1]
    assert rig.generate(prompt, greedy()).token_ids == expected(prompt, 8)
    rig.check_idle()


def test_salts_keep_caches_apart() -> None:
    rig = make_rig()
    cached = [
        rig.generate(PROMPT, greedy(cache_salt=salt)).cached_tokens for salt in ("X", "X", "Y", None, None, "request 0")
    ]
    assert cached == [0, 24, 0, 0, 24, 0]


def test_without_a_prefix_cache_nothing_is_found() -> None:
    rig = make_rig(enable_prefix_cache=False)
    assert [rig.generate(PROMPT, greedy()).cached_tokens for _ in range(2)] == [0, 0]


def test_the_second_turn_finds_the_first_and_its_reply() -> None:
    """Pages hold exactly what the client got: the reply up to the stop, and nothing behind it."""
    rig = make_rig()
    first = rig.generate(PROMPT, greedy(9))
    turn = [*PROMPT, *first.token_ids, 50, 51]
    second = rig.generate(turn, greedy())
    assert second.cached_tokens == (len(PROMPT) + 9 - 1) // 4 * 4
    assert second.token_ids == expected(turn, 8)


def test_two_long_prompts_in_a_pool_for_one_both_finish_without_thrashing() -> None:
    rig = make_rig(num_slots=12, tokens_per_page=4, max_tokens_per_step=4, enable_prefix_cache=False, max_model_len=48)
    prompts = [[6 + (i * k) % 200 for i in range(37)] for k in (3, 5)]
    collectors = [rig.submit(prompt, greedy(3)) for prompt in prompts]
    rig.run()
    for prompt, collector in zip(prompts, collectors, strict=True):
        assert collector.output.token_ids == expected(prompt, 3)
    assert sum(collector.output.num_preemptions for collector in collectors) <= 1
    rig.check_idle()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("victim_start", range(9))
def test_a_request_preempted_at_any_step_comes_back_with_the_same_tokens(victim_start: int, overlap: bool) -> None:
    """A later request that grows beside a more urgent one must give its pages up at some step."""
    prompts = [[20, 21, 22], [30 + i for i in range(10)]]
    rig = make_rig(num_slots=9, tokens_per_page=4, max_tokens_per_step=4, max_model_len=32, overlap=overlap)
    urgent = rig.submit(prompts[0], greedy(24, priority=0))
    for _ in range(victim_start):
        rig.engine.step()
    victim = rig.submit(prompts[1], greedy(16, priority=1))
    rig.run()
    assert urgent.output.token_ids == expected(prompts[0], 24)
    assert victim.output.token_ids == expected(prompts[1], 16)
    assert urgent.output.num_preemptions == 0
    rig.check_idle()


def test_preemption_really_happens_in_the_test_above() -> None:
    rig = make_rig(num_slots=9, tokens_per_page=4, max_tokens_per_step=4, max_model_len=32)
    rig.submit([20, 21, 22], greedy(24, priority=0))
    victim = rig.submit([30 + i for i in range(10)], greedy(16, priority=1))
    rig.run()
    assert victim.output.num_preemptions >= 1


def test_penalties_survive_preemption() -> None:
    params = greedy(16, priority=1, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.5)
    prompt = [30 + i for i in range(10)]

    def looping(prefix: tuple[int, ...]) -> int:
        return 60 + len(prefix) % 2

    alone = make_rig(ScriptedModel(looping)).generate(prompt, params)
    assert len(set(alone.token_ids)) > 2, "the penalties must bite"
    rig = make_rig(ScriptedModel(looping), num_slots=9, tokens_per_page=4, max_tokens_per_step=4, max_model_len=32)
    rig.submit([20, 21, 22], greedy(24, priority=0))
    victim = rig.submit(prompt, params)
    rig.run()
    assert victim.output.num_preemptions >= 1
    assert victim.output.token_ids == alone.token_ids


def test_a_seat_keeps_nothing_of_its_last_owner() -> None:
    """Penalties of the second request must not see the prompt or the text of the first."""
    params = greedy(10, repetition_penalty=3.0, presence_penalty=1.0)
    used = make_rig(max_seats=1)
    used.generate([7, *expected(PROMPT, 10)], params)
    fresh = make_rig(max_seats=1)
    assert used.generate(PROMPT, params).token_ids == fresh.generate(PROMPT, params).token_ids


def sampled(seed: int | None, **changes: object) -> SamplingParams:
    return SamplingParams(temperature=3.0, max_tokens=12, seed=seed, **changes)


NEIGHBOURS = [
    [],
    [sampled(None)],
    [sampled(7)],
    [sampled(7), sampled(None), greedy(12)],
    [sampled(None, top_k=3, min_tokens=2), sampled(42, top_p=0.5), sampled(8, frequency_penalty=1.0)],
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("neighbours", NEIGHBOURS)
def test_a_seeded_request_does_not_notice_its_neighbours(
    neighbours: list[SamplingParams], first: bool, overlap: bool
) -> None:
    alone = make_rig().generate(PROMPT, sampled(42)).token_ids
    rig = make_rig(overlap=overlap, max_tokens_per_step=9)
    collector = rig.submit(PROMPT, sampled(42)) if first else None
    for i, params in enumerate(neighbours):
        rig.submit(PROMPT[i:], params)
    collector = collector or rig.submit(PROMPT, sampled(42))
    rig.run()
    assert collector.output.token_ids == alone
    assert make_rig().generate(PROMPT, sampled(43)).token_ids != alone


def test_requests_without_a_seed_differ() -> None:
    rig = make_rig()
    texts = {tuple(rig.generate(PROMPT, sampled(None)).token_ids) for _ in range(5)}
    assert len(texts) == 5


BASE = SamplingParams(temperature=2.0, max_tokens=60, seed=5)
EFFECTS = [
    {"temperature": 6.0},
    {"temperature": 0},
    {"top_k": 1},
    {"top_p": 0.05},
    {"min_p": 0.9},
    {"repetition_penalty": 8.0},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"logit_bias": {200: 100.0}},
    {"seed": 6},
    {"max_tokens": 5},
]


@pytest.mark.parametrize("change", EFFECTS, ids=lambda change: next(iter(change)))
def test_each_sampling_field_changes_what_is_generated(change: dict[str, object]) -> None:
    def narrow(prefix: tuple[int, ...]) -> int:
        return 100 + len(prefix) % 3

    plain = make_rig(ScriptedModel(narrow)).generate(PROMPT, BASE).token_ids
    changed = make_rig(ScriptedModel(narrow)).generate(PROMPT, dataclasses.replace(BASE, **change)).token_ids
    assert changed != plain


def test_the_more_urgent_of_two_waiting_requests_runs_first() -> None:
    rig = make_rig(max_seats=1)
    order: list[str] = []
    for name, priority in (("running", 0), ("late", 5), ("soon", 1), ("soonest", -3)):
        collector = rig.submit([len(name)], greedy(4, priority=priority))
        collector.on_end = lambda name=name: order.append(name)
        if name == "running":
            rig.engine.step()
    rig.run()
    assert order == ["running", "soonest", "soon", "late"]


@dataclass
class Live:
    prompt: list[int]
    params: SamplingParams
    collector: Collector
    request_id: int
    aborted: bool = False


@dataclass
class Interleaver:
    """A seeded random order of arrivals, steps, aborts and failing steps, with every promise checked after each."""

    rig: Rig
    rng: random.Random
    prompts: list[list[int]]
    live: list[Live] = field(default_factory=list)
    finished: list[tuple[Live, RequestOutput]] = field(default_factory=list)

    def arrive(self) -> None:
        prompt = self.rng.choice(self.prompts)
        prompt = prompt[: self.rng.randint(1, len(prompt))]
        seed = self.rng.choice([None, 1, 2])
        params = SamplingParams(
            temperature=0 if seed is None else 2.5,
            seed=seed,
            max_tokens=self.rng.randint(1, 24),
            priority=self.rng.choice([0, 0, 1]),
            frequency_penalty=self.rng.choice([0.0, 0.0, 0.5]),
            speculate=self.rng.random() < 0.8,
        )
        collector = Collector()
        request_id = self.rig.engine.submit(prompt, params, collector, stream=self.rng.random() < 0.5)
        self.live.append(Live(prompt, params, collector, request_id))

    def step(self) -> None:
        self.rig.engine.step()

    def abort(self) -> None:
        if self.live:
            victim = self.rng.choice(self.live)
            victim.aborted = True
            self.rig.engine.abort(victim.request_id)

    def failing_step(self) -> None:
        """The next step to be planned raises, wherever the one before it stands."""
        step_id = self.rig.scheduler.stats().num_planned_steps
        self.rng.choice([self.rig.faults.before, self.rig.faults.half_way]).add(step_id)
        self.rig.engine.step()

    def check(self) -> None:
        self.rig.scheduler.check()
        ledger = self.rig.scheduler.ledger()
        assert ledger.free + ledger.cached + ledger.held + ledger.leased == ledger.total
        for each in list(self.live):
            if each.collector.done:
                self.live.remove(each)
                self.finished.append((each, each.collector.output))

    def run(self, num_events: int) -> None:
        events = [self.arrive] * 6 + [self.step] * 20 + [self.abort] * 2 + [self.failing_step]
        for _ in range(num_events):
            self.rng.choice(events)()
            self.check()
        self.rig.run()
        self.check()
        assert not self.live
        self.rig.check_idle()


def check_outputs(interleaver: Interleaver) -> None:
    """What ran to its end equals the same request alone; what did not is a beginning of it."""
    alone: dict[tuple[tuple[int, ...], int | None, int, float], RequestOutput] = {}
    for each, output in interleaver.finished:
        params = each.params
        key = (tuple(each.prompt), params.seed, params.max_tokens or 0, params.frequency_penalty)
        if key not in alone:
            alone[key] = make_rig(max_model_len=30, tokenizer=TOKENIZER).generate(each.prompt, params)
        if output.finish_reason == "length":
            assert (output.token_ids, output.text) == (alone[key].token_ids, alone[key].text)
        else:
            assert output.finish_reason == "error" or each.aborted
            assert output.token_ids == alone[key].token_ids[: len(output.token_ids)]
            assert alone[key].text.startswith(output.text)
        if len(each.collector.deltas) > 1:
            assert "".join(delta.text for delta in each.collector.deltas) == output.text
        streamed = [token for delta in each.collector.deltas for token in delta.token_ids]
        assert streamed == output.token_ids or len(each.collector.deltas) == 1


def interleave(seed: int, num_events: int) -> Interleaver:
    rng = random.Random(seed)
    shared = [6 + rng.randrange(VOCAB_SIZE - 6) for _ in range(14)]
    prompts = [shared + [6 + rng.randrange(250) for _ in range(4)] for _ in range(4)]
    draft_len = rng.choice([None, 0, 1, 2, 3, 5, 7])
    tokens_per_page = rng.choice([2, 4, 8])
    rig = make_rig(
        # From what the longest request needs alone.
        num_slots=-(-30 // tokens_per_page) + rng.choice([0, 1, 3, 6]),
        tokens_per_page=tokens_per_page,
        max_seats=rng.choice([1, 4, 6]),
        max_tokens_per_step=max(rng.choice([3, 6, 16]), 1 + (draft_len or 0)),
        max_model_len=30,
        overlap=rng.random() < 0.7,
        draft_len=draft_len,
        max_speculating_rows=rng.choice([1, 3, 6]),
        watermark_pages=rng.choice([0, 1]),
        enable_prefix_cache=rng.random() < 0.8,
        tokenizer=TOKENIZER,
    )
    interleaver = Interleaver(rig, rng, prompts)
    interleaver.run(num_events)
    check_outputs(interleaver)
    return interleaver


@pytest.mark.parametrize("case", range(12))
def test_random_events_leave_the_books_clean_and_every_request_ends_once(case: int, seed: int) -> None:
    interleave(seed + case, 150)


def test_the_interleaver_meets_every_kind_of_event(seed: int) -> None:
    runs = [interleave(seed + case, 150) for case in range(100, 106)]
    reasons = {output.finish_reason for run in runs for _, output in run.finished}
    assert reasons == {"length", "abort", "error"}
    assert sum(run.rig.scheduler.stats().num_failed_steps for run in runs) > 0
    assert sum(output.num_preemptions for run in runs for _, output in run.finished) > 0
    assert sum(output.cached_tokens for run in runs for _, output in run.finished) > 0
    assert sum(run.rig.scheduler.stats().num_accepted_tokens for run in runs) > 0
    assert sum(run.rig.scheduler.stats().num_dropped_rows for run in runs) > 0


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1000, 1300, 25))
def test_many_random_events_leave_the_books_clean(first: int, seed: int) -> None:
    for case in range(first, first + 25):
        interleave(seed + case, 1000)
