"""A model without mathematics behind the engine's real seam: it knows nothing but what it reads back from the cache.

Each token id that the engine writes is stored in the slot and place that the step names. The next token is a function
of the whole prefix as read through the block table, so a page that is shared, evicted, reused or attended wrongly
changes the output at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.core import layout, sched
from tandem.engine.engine import Engine
from tandem.engine.outputs import Delta, RequestOutput
from tandem.engine.params import SamplingParams
from tandem.engine.runner import ModelRunner
from tandem.engine.tokenizer import Tokenizer
from tandem.msa import AttentionBackend, Limits, SeatState, StepMetadata
from tandem.spec import DraftWorker, Verified, extend_slots, extend_token_ids
from tandem.spec.slots import single_slots

VOCAB_SIZE = 300
UNWRITTEN = -1

NextToken = Callable[[tuple[int, ...]], int]
TokenArray = npt.NDArray[np.int64]


def hashed(prefix: tuple[int, ...]) -> int:
    """A next token that depends on every token before it, never a special one of `byte_tokenizer`."""
    value = 17
    for token in prefix:
        value = (value * 1_000_003 + token + 1) % (2**61 - 1)
    return 6 + value % 256


def script(prompt: Sequence[int], tokens: Sequence[int]) -> NextToken:
    """Emits ``tokens`` one after the other behind ``prompt``, then the first again and again."""

    def following(prefix: tuple[int, ...]) -> int:
        done = len(prefix) - len(prompt)
        return tokens[done] if 0 <= done < len(tokens) else tokens[0]

    return following


class TokenCache(AttentionBackend):
    """Pages of token ids, of the target and of a drafter: entry j of either is token j.

    Reading a place that was not written since its page was handed out fails the test.
    """

    def __init__(self, limits: Limits, state: SeatState) -> None:
        spec = layout.TileSpec(0, layout.Role.K, layout.ElementType.FP32, 1, 1)
        cache_layout = layout.CacheLayout([spec], limits.tokens_per_page)
        pool = torch.zeros(limits.num_slots * cache_layout.slot_bytes, dtype=torch.uint8)
        super().__init__(cache_layout, pool, limits, state, [])
        shape = (limits.num_slots, limits.tokens_per_page)
        self.target = np.full(shape, UNWRITTEN, dtype=np.int64)
        self.draft = np.full(shape, UNWRITTEN, dtype=np.int64)

    def forget(self, slot: int) -> None:
        self.target[slot] = self.draft[slot] = UNWRITTEN

    def put(self, entries: TokenArray, seat: int, index: int, token: int) -> None:
        slot = int(self.state.block_table[seat, index // self.limits.tokens_per_page])
        entries[slot, index % self.limits.tokens_per_page] = token

    def read(self, entries: TokenArray, seat: int, first: int, end: int) -> tuple[int, ...]:
        pages = -(-end // self.limits.tokens_per_page)
        slots = self.state.block_table[seat, :pages].numpy()
        tokens = tuple(entries[slots].reshape(-1)[first:end].tolist())
        assert UNWRITTEN not in tokens, f"seat {seat} reads a place that nobody wrote: {tokens}"
        return tokens

    def write(self, layer: int, k: Tensor, v: Tensor, index_k: Tensor | None, tokens: Any) -> None:
        raise NotImplementedError

    def select(self, layer: int, index_q: Tensor, tokens: Any) -> Tensor:
        raise NotImplementedError

    def attend(self, layer: int, q: Tensor, blocks: Tensor | None, tokens: Any) -> Tensor:
        raise NotImplementedError


class ScriptedModel:
    """Logits 8 for the next token, 4 for the id after it, 0 for all others (-inf with ``certain``).

    ``nan_prefixes`` get logits of NaN.
    """

    def __init__(self, next_token: NextToken = hashed, *, certain: bool = False) -> None:
        self.next_token = next_token
        self.certain = certain
        self.before_forward: Callable[[StepMetadata], None] = lambda meta: None
        self.nan_prefixes: set[tuple[int, ...]] = set()
        self.num_tokens = 0

    def forward(
        self, token_ids: Tensor, meta: StepMetadata, attention: AttentionBackend, capture: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        assert isinstance(attention, TokenCache)
        self.before_forward(meta)
        self.num_tokens += meta.num_tokens
        assert int(token_ids.min()) >= 0
        seats, writes, sees = meta.token_seat.tolist(), meta.write_index.tolist(), meta.kv_len.tolist()
        for seat, index, token in zip(seats, writes, token_ids.tolist(), strict=True):
            if index >= 0:
                attention.put(attention.target, seat, index, token)
        logits = torch.full((meta.num_tokens, VOCAB_SIZE), -torch.inf if self.certain else 0.0)
        for row, (seat, length) in enumerate(zip(seats, sees, strict=True)):
            prefix = attention.read(attention.target, seat, 0, length)
            token = self.next_token(prefix)
            logits[row, (token + 1) % VOCAB_SIZE] = 4.0
            logits[row, token] = 8.0
            if prefix in self.nan_prefixes:
                logits[row] = torch.nan
        return logits, []

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class ScriptedWorker(DraftWorker):
    """Drafts the model's own next tokens, the first few of a round rightly, by where the text stands.

    Reads and writes its entries where a drafter does, and checks that those of the text are the text's tokens.
    """

    captured_layers = ()

    def __init__(self, cache: TokenCache, draft_len: int, next_token: NextToken) -> None:
        self._cache, self._draft_len, self._next_token = cache, draft_len, next_token
        self.num_drafted = 0

    def run(
        self,
        meta: StepMetadata,
        sampled: Tensor,
        verified: Verified,
        captured: Sequence[Tensor],
        proposing: Tensor | None = None,
    ) -> Tensor:
        rows = range(meta.num_samples) if proposing is None else proposing.tolist()
        cache = self._cache
        slots = extend_slots(meta)
        ids = extend_token_ids(meta, sampled).tolist()
        for seat, index, token in zip(slots.token_seat.tolist(), slots.write_index.tolist(), ids, strict=True):
            if index >= 0:
                cache.put(cache.draft, seat, index, token)
        drafts = torch.full((meta.num_samples, self._draft_len), -1, dtype=torch.int32)
        newest_index = meta.kv_len[verified.place]
        max_length = meta.row_max_length[meta.sample_row]
        known: dict[int, list[int]] = {}
        for row, (seat, newest) in enumerate(zip(meta.sample_seat.tolist(), newest_index.tolist(), strict=True)):
            if 0 < newest < int(max_length[row]):
                text = [*cache.read(cache.target, seat, 0, newest), int(verified.newest[row])]
                assert list(cache.read(cache.draft, seat, 1, newest + 1)) == text[1:]
                known[row] = text
        for step in range(1, self._draft_len + 1):
            unused = torch.zeros_like(newest_index)
            single = single_slots(meta.sample_seat, newest_index, max_length, unused, step, torch.empty_like(drafts))
            for row in rows:
                if single.kv_len[row] == 0:
                    continue
                text = known[row]
                right = text[0] + len(text) * 7 & 3
                token = (self._next_token(tuple(text)) + (step > right)) % VOCAB_SIZE
                text.append(token)
                drafts[row, step - 1] = token
                if step < self._draft_len:
                    cache.put(cache.draft, int(single.token_seat[row]), int(single.write_index[row]), token)
                self.num_drafted += 1
        return drafts


@dataclass
class Faults:
    """Where the steps of these numbers raise: before anything of them runs, or in the model, half way."""

    before: set[int] = field(default_factory=set)
    half_way: set[int] = field(default_factory=set)
    running: int = -1

    def start(self, plan: sched.StepPlan) -> None:
        self.running = plan.step_id
        if self.running in self.before:
            raise RuntimeError("injected before the step")

    def middle(self, meta: StepMetadata) -> None:
        if self.running in self.half_way:
            raise RuntimeError("injected in the model")


@dataclass
class Collector:
    """Keeps what a request sends."""

    deltas: list[Delta] = field(default_factory=list)
    on_end: Callable[[], None] = lambda: None

    def __call__(self, delta: Delta) -> None:
        assert not self.done, "a delta after the end"
        self.deltas.append(delta)
        if self.done:
            self.on_end()

    @property
    def done(self) -> bool:
        return bool(self.deltas) and self.deltas[-1].output is not None

    @property
    def output(self) -> RequestOutput:
        output = self.deltas[-1].output
        assert output is not None
        return output


@dataclass(frozen=True)
class Rig:
    """An engine over a scripted model, driven step by step."""

    engine: Engine
    scheduler: sched.Scheduler
    model: ScriptedModel
    cache: TokenCache
    faults: Faults

    def submit(self, prompt: Sequence[int], params: SamplingParams, *, stream: bool = False) -> Collector:
        collector = Collector()
        self.engine.submit(prompt, params, collector, stream=stream)
        return collector

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.engine.step():
                return
        raise AssertionError(f"not idle after {max_steps} steps")

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
        collector = self.submit(prompt, params)
        self.run()
        return collector.output

    def check_idle(self) -> None:
        """Every page free or cached, then, once the cache is cleared, every page free."""
        self.scheduler.check()
        ledger = self.scheduler.ledger()
        assert (ledger.held, ledger.leased) == (0, 0)
        assert ledger.free + ledger.cached == ledger.total
        self.engine.reset_prefix_cache()
        ledger = self.scheduler.ledger()
        assert ledger.free == ledger.total


def make_rig(
    model: ScriptedModel | None = None,
    *,
    num_slots: int = 64,
    tokens_per_page: int = 4,
    max_seats: int = 8,
    max_tokens_per_step: int = 64,
    max_model_len: int = 128,
    overlap: bool = False,
    enable_prefix_cache: bool = True,
    watermark_pages: int = 0,
    tokenizer: Tokenizer | None = None,
    end_ids: Sequence[int] = (),
    draft_len: int | None = None,
    max_speculating_rows: int = 2**31 - 1,
) -> Rig:
    """An engine over a scripted model; with a drafter where there is a ``draft_len``."""
    limits = Limits(
        max_seats=max_seats,
        max_tokens=max_tokens_per_step,
        max_rows=max_seats,
        max_model_len=max_model_len,
        tokens_per_page=tokens_per_page,
        max_pages=-(-max_model_len // tokens_per_page),
        max_draft_len=draft_len or 0,
        num_slots=num_slots,
    )
    config = sched.SchedulerConfig(
        num_slots=num_slots,
        tokens_per_page=tokens_per_page,
        max_seats=max_seats,
        max_tokens_per_step=max_tokens_per_step,
        max_model_len=max_model_len,
        draft_len=draft_len or 0,
        has_drafter=draft_len is not None,
        overlap=overlap,
        enable_prefix_cache=enable_prefix_cache,
        watermark_pages=watermark_pages,
        max_speculating_rows=max_speculating_rows,
    )
    scheduler = sched.Scheduler(config)
    state = SeatState(limits)
    cache = TokenCache(limits, state)
    model = model or ScriptedModel()

    faults = Faults()
    model.before_forward = faults.middle

    def before_step(plan: sched.StepPlan) -> None:
        """A page that a row gets without its being a hit holds nothing that may be read."""
        faults.start(plan)
        write_from = dict(zip(plan.seat.tolist(), plan.write_from.tolist(), strict=True))
        for seat, page, slot in plan.table_changes.tolist():
            if page * tokens_per_page >= write_from[seat]:
                cache.forget(slot)

    runner = ModelRunner(
        model,
        cache,
        state,
        limits,
        VOCAB_SIZE,
        steps_in_flight=config.max_steps_in_flight,
        draft_worker=None if draft_len is None else ScriptedWorker(cache, draft_len, model.next_token),
        before_step=before_step,
    )
    engine = Engine(scheduler, runner, end_ids=end_ids, tokenizer=tokenizer)
    return Rig(engine, scheduler, model, cache, faults)


def expected(prompt: Sequence[int], count: int, next_token: NextToken = hashed) -> list[int]:
    """The greedy tokens behind a prompt, by the definition."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(prompt) :]
