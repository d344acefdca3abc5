"""From options to a running engine: checkpoint, cache layout, limits, pool, scheduler."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch

from tandem import demo
from tandem.core import cpu, layout, sched
from tandem.engine.engine import Engine
from tandem.engine.errors import InvalidParameterError
from tandem.engine.limits import SizeRequest, resolve_limits
from tandem.engine.memory import available_memory
from tandem.engine.poison import PoolPoison
from tandem.engine.runner import ModelRunner
from tandem.engine.tokenizer import Tokenizer, read_json
from tandem.models import (
    CpuOps,
    MiniMaxM3Config,
    ReferenceOps,
    attention_geometry,
    eagle3,
    load_model,
    tile_specs,
)
from tandem.models.eagle3_config import Eagle3Config
from tandem.models.minimax_m3_weights import open_weights
from tandem.msa import AttentionBackend, CpuBackend, LayerGeometry, Limits, ReferenceBackend, SeatState
from tandem.spec import DraftWorker

_log = logging.getLogger(__name__)

DtypeName = Literal["float32", "bfloat16"]
BackendName = Literal["cpu", "reference"]

DEFAULT_DRAFT_LEN = 3
MAX_DRAFT_LEN = 7
# On a CPU with 3 drafts, a round costs as much as 2 steps without drafts at one row, 3 at 16, more beyond.
DEFAULT_MAX_SPECULATING_ROWS = 16

_DTYPES = {
    "float32": (torch.float32, layout.ElementType.FP32),
    "bfloat16": (torch.bfloat16, layout.ElementType.BF16),
}


def model_folder(model: str | Path) -> Path:
    """The folder that a model's name stands for: ``demo`` is the one that comes with the package."""
    return demo.path() if model == "demo" else Path(model)


@dataclass(frozen=True)
class EngineOptions:
    """Everything that shapes an engine; `tandem.LLM` documents the fields."""

    model: str | Path
    drafter: str | Path | None = None
    dtype: DtypeName = "float32"
    kv_dtype: DtypeName | None = None
    sizes: SizeRequest = field(default_factory=SizeRequest)
    enable_prefix_cache: bool = True
    num_threads: int | None = None
    backend: BackendName = "cpu"
    seed: int | None = None
    overlap: bool = True
    max_speculating_rows: int | None = None
    poison_pool: bool = False
    wrap_attention: Callable[[AttentionBackend], AttentionBackend] | None = None

    def __post_init__(self) -> None:
        _require_one_of("dtype", self.dtype, get_args(DtypeName))
        if self.kv_dtype is not None:
            _require_one_of("kv_dtype", self.kv_dtype, get_args(DtypeName))
        _require_one_of("backend", self.backend, get_args(BackendName))
        if self.num_threads is not None and (not isinstance(self.num_threads, int) or self.num_threads < 1):
            raise InvalidParameterError("num_threads", self.num_threads, "an integer >= 1")
        most_drafts = 0 if self.drafter is None else MAX_DRAFT_LEN
        if self.sizes.draft_len not in range(most_drafts + 1):
            allowed = (
                "0 without a drafter"
                if self.drafter is None
                else f"an integer from 0 to {MAX_DRAFT_LEN} (one line of drafts, no tree)"
            )
            raise InvalidParameterError("draft_len", self.sizes.draft_len, allowed)
        rows = self.max_speculating_rows
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or not 0 <= rows < 2**31):
            raise InvalidParameterError("max_speculating_rows", rows, "an integer of at least 0")

    @property
    def model_path(self) -> Path:
        """The model's folder."""
        return model_folder(self.model)


@dataclass(frozen=True)
class BuiltEngine:
    """An engine and what it was resolved to."""

    engine: Engine
    config: MiniMaxM3Config
    limits: Limits
    load_seconds: float


def build_engine(options: EngineOptions, tokenizer: Tokenizer) -> BuiltEngine:
    """Load the checkpoint and put the engine together, on the thread that will drive it.

    Raises:
        CheckpointError: the model folder is at fault.
        InvalidParameterError: a size is out of range.
        PoolTooSmallError: the pool cannot hold one sequence.
    """
    start = time.perf_counter()
    _set_threads(options.num_threads or len(os.sched_getaffinity(0)))
    dtype, _ = _DTYPES[options.dtype]
    _, kv_type = _DTYPES[options.kv_dtype or options.dtype]
    config = MiniMaxM3Config.from_pretrained(options.model_path)
    draft_config = None if options.drafter is None else Eagle3Config.from_pretrained(options.drafter)
    tiles, geometry = _cached_layers(config, draft_config, kv_type)
    cache_layout = layout.CacheLayout(tiles, config.block_size)
    limits = _resolve(options, config, draft_config, cache_layout)
    ops = CpuOps() if options.backend == "cpu" else ReferenceOps()
    model = load_model(options.model_path, dtype, ops)
    pool = torch.empty(limits.num_slots * cache_layout.slot_bytes, dtype=torch.uint8)
    cpu.prefer_huge_pages(pool)
    poison = PoolPoison(pool, cache_layout.slot_bytes, limits.tokens_per_page) if options.poison_pool else None
    state = SeatState(limits)
    backend = CpuBackend if options.backend == "cpu" else ReferenceBackend
    attention: AttentionBackend = backend(cache_layout, pool, limits, state, geometry)
    if options.wrap_attention is not None:
        attention = options.wrap_attention(attention)
    draft_worker = None
    if options.drafter is not None:
        weights = open_weights(options.model_path, config)
        drafter = eagle3.load_drafter(options.drafter, model, weights, dtype, ops)
        draft_worker = DraftWorker(drafter, attention, limits.max_draft_len)
    scheduler = sched.Scheduler(_scheduler_config(limits, options))
    runner = ModelRunner(
        model,
        attention,
        state,
        limits,
        config.vocab_size,
        steps_in_flight=scheduler.config.max_steps_in_flight,
        draft_worker=draft_worker,
        before_step=poison,
    )
    try:
        end_ids = _end_ids(config, tokenizer, options.model_path)
        engine = Engine(scheduler, runner, end_ids=end_ids, tokenizer=tokenizer, seed=options.seed)
    except BaseException:
        # The error refers to the runner through its frames, so its thread would outlive the attempt.
        runner.close()
        raise
    seconds = time.perf_counter() - start
    pool_bytes = limits.num_slots * cache_layout.slot_bytes
    _log.info("loaded %s in %.2f s: %s, a pool of %d bytes", options.model_path, seconds, limits, pool_bytes)
    return BuiltEngine(engine, config, limits, seconds)


def _cached_layers(
    config: MiniMaxM3Config, draft_config: Eagle3Config | None, kv_type: layout.ElementType
) -> tuple[list[layout.TileSpec], list[LayerGeometry]]:
    """Tiles and geometry of every layer that the cache holds; a drafter's is the one after the target's."""
    tiles, geometry = tile_specs(config, kv_type), attention_geometry(config)
    if draft_config is not None:
        layer = config.num_hidden_layers
        tiles += eagle3.tile_specs(draft_config, layer, kv_type)
        geometry.append(eagle3.attention_geometry(draft_config, layer))
    return tiles, geometry


def _resolve(
    options: EngineOptions,
    config: MiniMaxM3Config,
    draft_config: Eagle3Config | None,
    cache_layout: layout.CacheLayout,
) -> Limits:
    folders = [options.model_path, *([] if options.drafter is None else [Path(options.drafter)])]
    weights = sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))
    widening = 2 if options.dtype == "float32" else 1
    positions = [config.max_position_embeddings]
    if draft_config is not None:
        positions.append(draft_config.max_position_embeddings)
    return resolve_limits(
        options.sizes,
        position_limit=min(positions),
        tokens_per_page=cache_layout.tokens_per_page,
        slot_bytes=cache_layout.slot_bytes,
        free_bytes=max(0, available_memory() - weights * widening),
    )


def _scheduler_config(limits: Limits, options: EngineOptions) -> sched.SchedulerConfig:
    return sched.SchedulerConfig(
        num_slots=limits.num_slots,
        tokens_per_page=limits.tokens_per_page,
        max_seats=limits.max_seats,
        max_tokens_per_step=limits.max_tokens,
        max_model_len=limits.max_model_len,
        draft_len=limits.max_draft_len,
        has_drafter=options.drafter is not None,
        overlap=options.overlap,
        max_speculating_rows=DEFAULT_MAX_SPECULATING_ROWS
        if options.max_speculating_rows is None
        else options.max_speculating_rows,
        enable_prefix_cache=options.enable_prefix_cache,
    )


def _end_ids(config: MiniMaxM3Config, tokenizer: Tokenizer, directory: Path) -> frozenset[int]:
    """Every id that the checkpoint's files name as an end, and M3's end of turn where the vocabulary has it."""
    generation = read_json(directory / "generation_config.json").get("eos_token_id")
    named = generation if isinstance(generation, list) else [] if generation is None else [generation]
    return frozenset([*config.eos_token_ids, *named]) | tokenizer.end_ids


def _set_threads(count: int) -> None:
    cpu.set_num_threads(count)
    torch.set_num_threads(count)


def _require_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidParameterError(name, value, f"one of {', '.join(allowed)}")
