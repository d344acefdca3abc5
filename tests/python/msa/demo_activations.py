"""Attention inputs of the demo model over one long text, recorded once and replayed on any backend."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tandem import demo
from tandem.core import layout as core_layout
from tandem.models import MiniMaxM3Config, ReferenceOps, attention_geometry, load_model, tile_specs
from tandem.msa import (
    AttendedTokens,
    AttentionBackend,
    LayerGeometry,
    Limits,
    ReferenceBackend,
    SeatState,
    StepMetadata,
    derive,
)

from .faults import Margins
from .plans import context, decode, plan
from .worlds import BACKENDS

NUM_TOKENS = 1200
_SLOTS = 24


@dataclass
class LayerInputs:
    """One layer's q [T, Hq, D], k, v [T, Hk, D] and, if sparse, index_q [T, Hi, Di], index_k [T, Di] and blocks."""

    q: Tensor
    k: Tensor
    v: Tensor
    index_q: Tensor | None
    index_k: Tensor | None
    blocks: Tensor | None


@dataclass
class Recording:
    config: MiniMaxM3Config
    token_ids: list[int]
    layers: list[LayerInputs] = field(default_factory=list)

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def num_sets(self) -> int:
        """Selections: one per token, index head and sparse layer."""
        return sum(layer.blocks.shape[0] * layer.blocks.shape[1] for layer in self.layers if layer.blocks is not None)


class Recorder(ReferenceBackend):
    """Answers as the reference does and keeps what it was given."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.written: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
        self.selected: dict[int, tuple[Tensor, Tensor]] = {}
        self.attended: dict[int, Tensor] = {}

    def write(self, layer: int, k: Tensor, v: Tensor, index_k: Tensor | None, tokens: AttendedTokens) -> None:
        self.written[layer] = (k.clone(), v.clone(), None if index_k is None else index_k.clone())
        super().write(layer, k, v, index_k, tokens)

    def select(self, layer: int, index_q: Tensor, tokens: AttendedTokens) -> Tensor:
        blocks = super().select(layer, index_q, tokens)
        self.selected[layer] = (index_q.clone(), blocks)
        return blocks

    def attend(self, layer: int, q: Tensor, blocks: Tensor | None, tokens: AttendedTokens) -> Tensor:
        self.attended[layer] = q.clone()
        return super().attend(layer, q, blocks, tokens)


def _text() -> str:
    rng = random.Random(17)
    first = ["amber", "quiet", "golden", "lonely", "swift", "misty", "proud", "velvet"]
    second = ["falcon", "violin", "harbor", "castle", "teapot", "maple", "comet", "wagon"]
    return " ".join(
        f"The code of the {rng.choice(first)} {rng.choice(second)} is {rng.randint(1000, 9999)}."
        if rng.random() < 0.5
        else f"A {rng.choice(first)} {rng.choice(second)} stood near the {rng.choice(second)}."
        for _ in range(400)
    )


@dataclass
class Cache:
    """A pool of fragmented pages for one sequence of the demo model."""

    config: MiniMaxM3Config
    limits: Limits = field(init=False)
    state: SeatState = field(init=False)
    layout: core_layout.CacheLayout = field(init=False)
    pool: Tensor = field(init=False)

    def __post_init__(self) -> None:
        page = self.config.block_size
        self.limits = Limits(
            max_seats=1,
            max_tokens=NUM_TOKENS,
            max_rows=1,
            max_model_len=NUM_TOKENS,
            tokens_per_page=page,
            max_pages=-(-NUM_TOKENS // page),
            max_draft_len=3,
            num_slots=_SLOTS,
        )
        self.layout = core_layout.CacheLayout(tile_specs(self.config, core_layout.ElementType.FP32), page)
        self.pool = torch.full((_SLOTS * self.layout.slot_bytes,), 255, dtype=torch.uint8)
        self.state = SeatState(self.limits)
        slots = random.Random(3).sample(range(_SLOTS), self.limits.max_pages)
        self.state.block_table[0] = torch.tensor(slots, dtype=torch.int32)

    def backend(self, build: type[AttentionBackend], geometry: list[LayerGeometry]) -> AttentionBackend:
        return build(self.layout, self.pool, self.limits, self.state, geometry)


def record_demo_model() -> Recording:
    config = MiniMaxM3Config.from_pretrained(demo.path())
    ids = Tokenizer.from_file(str(demo.path() / "tokenizer.json")).encode(_text()).ids[:NUM_TOKENS]
    assert len(ids) == NUM_TOKENS
    model = load_model(demo.path(), torch.float32, ReferenceOps())
    cache = Cache(config)
    recorder = cache.backend(Recorder, attention_geometry(config))
    assert isinstance(recorder, Recorder)
    meta = StepMetadata(cache.limits)
    derive(plan(context(0, 0, [*ids, -1], fresh=True, max_length=NUM_TOKENS)), cache.state, meta)
    model.forward(meta.token_ids, meta, recorder)
    recording = Recording(config, ids)
    for layer in range(config.num_hidden_layers):
        index_q, blocks = recorder.selected.get(layer, (None, None))
        k, v, index_k = recorder.written[layer]
        recording.layers.append(LayerInputs(recorder.attended[layer], k, v, index_q, index_k, blocks))
    return recording


@dataclass
class LayerReplay:
    """What a backend made of one layer's recorded inputs, all tokens; outputs are those for the recorded blocks."""

    layer: int
    blocks: Tensor | None
    margins: Tensor | None
    out_given_blocks: Tensor | None


def replay(
    backend: str | type[AttentionBackend], recording: Recording, chunks: list[int], *, attend: bool = True
) -> Iterator[LayerReplay]:
    """Feeds the recording in chunks of the given sizes, and what is left of the text in verify rows of four.

    Without `attend` only selections are made, in the sparse layers.
    """
    cache = Cache(recording.config)
    build = BACKENDS[backend] if isinstance(backend, str) else backend
    attention = cache.backend(build, attention_geometry(recording.config))
    margins = Margins(attention) if isinstance(attention, ReferenceBackend) else None
    rows = []
    start = 0
    for size in chunks:
        rows.append((slice(start, start + size), context(0, start, [1] * (size + 1), fresh=start == 0)))
        start += size
    rows += [(slice(first, first + 4), decode(0, first, 3)) for first in range(start, NUM_TOKENS, 4)]
    meta = StepMetadata(cache.limits)
    for number, layer in enumerate(recording.layers):
        if not attend and layer.index_q is None:
            continue
        blocks, outs, gaps = [], [], []
        for part, row in rows:
            row.max_length = NUM_TOKENS
            cache.state.length[0] = row.first_index
            derive(plan(row), cache.state, meta)
            index_k = None if layer.index_k is None else layer.index_k[part]
            attention.write(number, layer.k[part], layer.v[part], index_k, meta)
            if layer.index_q is not None:
                blocks.append(attention.select(number, layer.index_q[part], meta))
                if margins is not None:
                    gaps.append(margins.of_step(number, layer.index_q[part], meta))
            if attend:
                chosen = None if layer.blocks is None else layer.blocks[part]
                outs.append(attention.attend(number, layer.q[part], chosen, meta))
        yield LayerReplay(number, *(torch.cat(each) if each else None for each in (blocks, gaps, outs)))
