"""Engines over tiny random M3 models in fp32, with cache memory that nobody wrote being NaN."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from tandem.core import layout, sched
from tandem.engine.engine import Engine
from tandem.engine.outputs import RequestOutput
from tandem.engine.params import SamplingParams
from tandem.engine.poison import PoolPoison
from tandem.engine.runner import ModelRunner
from tandem.engine.tokenizer import Tokenizer
from tandem.models import CpuOps, MiniMaxM3, MiniMaxM3Config, attention_geometry, eagle3, load_model, tile_specs
from tandem.msa import AttentionBackend, CpuBackend, Limits, SeatState
from tandem.spec import Drafter, DraftWorker
from tests.python.engine.scripted import Collector
from tests.python.models.support import Shape, random_weights, text_config, wrapped_config, write_checkpoint

VOCAB_SIZE = 128


@lru_cache
def tiny_model(block: int) -> MiniMaxM3:
    """Two dense layers, then two sparse ones that choose 2 blocks of ``block`` tokens."""
    shape = Shape(
        layers="dsss", hidden=32, heads=4, kv_heads=2, head_dim=32, block=block, topk=2, experts=4, vocab=VOCAB_SIZE
    )
    text = text_config(shape)
    weights = random_weights(MiniMaxM3Config.from_dict(text), seed=11)
    with tempfile.TemporaryDirectory() as folder:
        return load_model(write_checkpoint(Path(folder), wrapped_config(text), weights), torch.float32, CpuOps())


@dataclass(frozen=True)
class Variation:
    """How an engine runs; the tokens must not depend on any of it."""

    block: int = 4
    chunk: int = 64
    num_slots: int = 64
    max_seats: int = 8
    overlap: bool = False
    enable_prefix_cache: bool = True
    max_speculating_rows: int = 2**31 - 1
    poison: bool = True


@dataclass(frozen=True)
class TinyRig:
    """An engine driven step by step."""

    engine: Engine
    scheduler: sched.Scheduler
    pool: torch.Tensor

    def submit(self, prompt: list[int], params: SamplingParams) -> Collector:
        collector = Collector()
        self.engine.submit(prompt, params, collector)
        return collector

    def run(self) -> None:
        while self.engine.step():
            pass

    def generate(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        collector = self.submit(prompt, params)
        self.run()
        return collector.output


@dataclass(frozen=True)
class Speculation:
    """A drafter beside the model, and what makes its drafts."""

    drafter: eagle3.Eagle3
    draft_len: int
    make_worker: Callable[[Drafter, AttentionBackend, int], DraftWorker] = DraftWorker


def make_tiny_rig(variation: Variation, kv_type: layout.ElementType = layout.ElementType.FP32) -> TinyRig:
    return make_rig(tiny_model(variation.block), variation, kv_type)


def make_rig(
    model: MiniMaxM3,
    variation: Variation,
    kv_type: layout.ElementType = layout.ElementType.FP32,
    speculation: Speculation | None = None,
    tokenizer: Tokenizer | None = None,
) -> TinyRig:
    config = model.config
    draft_len = 0 if speculation is None else speculation.draft_len
    limits = Limits(
        max_seats=variation.max_seats,
        max_tokens=variation.chunk,
        max_rows=variation.max_seats,
        max_model_len=96,
        tokens_per_page=config.block_size,
        max_pages=-(-96 // config.block_size),
        max_draft_len=draft_len,
        num_slots=variation.num_slots,
    )
    tiles, geometry = tile_specs(config, kv_type), attention_geometry(config)
    if speculation is not None:
        drafter = speculation.drafter
        tiles += eagle3.tile_specs(drafter.config, drafter.layer, kv_type)
        geometry.append(eagle3.attention_geometry(drafter.config, drafter.layer))
    cache_layout = layout.CacheLayout(tiles, config.block_size)
    pool = torch.zeros(limits.num_slots * cache_layout.slot_bytes, dtype=torch.uint8)
    state = SeatState(limits)
    attention = CpuBackend(cache_layout, pool, limits, state, geometry)
    scheduler = sched.Scheduler(
        sched.SchedulerConfig(
            num_slots=limits.num_slots,
            tokens_per_page=limits.tokens_per_page,
            max_seats=limits.max_seats,
            max_tokens_per_step=limits.max_tokens,
            max_model_len=limits.max_model_len,
            draft_len=draft_len,
            has_drafter=speculation is not None,
            overlap=variation.overlap,
            enable_prefix_cache=variation.enable_prefix_cache,
            watermark_pages=0,
            max_speculating_rows=variation.max_speculating_rows,
        )
    )
    runner = ModelRunner(
        model,
        attention,
        state,
        limits,
        config.vocab_size,
        steps_in_flight=scheduler.config.max_steps_in_flight,
        draft_worker=speculation and speculation.make_worker(speculation.drafter, attention, draft_len),
        before_step=PoolPoison(pool, cache_layout.slot_bytes, config.block_size) if variation.poison else None,
    )
    end_ids = () if tokenizer is None else tokenizer.end_ids
    return TinyRig(Engine(scheduler, runner, end_ids=end_ids, tokenizer=tokenizer), scheduler, pool)
