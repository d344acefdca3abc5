"""What a model folder holds and what serving it takes, from `config.json` and safetensors headers alone."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tandem.core import layout
from tandem.models import eagle3
from tandem.models.checkpoint import CheckpointWeights, WeightKind
from tandem.models.config import MiniMaxM3Config
from tandem.models.eagle3_config import Eagle3Config, find_drafter
from tandem.models.eagle3_weights import Eagle3Weights
from tandem.models.errors import OptionError, listed
from tandem.models.minimax_m3 import tile_specs
from tandem.models.minimax_m3_weights import IGNORED_PREFIXES, TEXT_PREFIX, weight_specs
from tandem.models.quant import WeightFormat
from tandem.models.safetensors_files import SafetensorsFiles

KV_DTYPES = {
    "bfloat16": layout.ElementType.BF16,
    "float16": layout.ElementType.FP16,
    "float32": layout.ElementType.FP32,
    "fp8_e4m3": layout.ElementType.FP8_E4M3,
    "nvfp4": layout.ElementType.NVFP4,
}
DEFAULT_MEMORY_GIB = (1.0, 8.0, 24.0, 80.0, 141.0)

_CONTEXTS = (4096, 32768, 131072, 1048576)
_GIB = 2**30


@dataclass(frozen=True)
class WeightsSummary:
    """The text model's weights. Sizes are bytes; where files are absent, what a bf16 checkpoint takes."""

    num_tensors: int
    num_parameters: int
    num_bytes: int
    complete: bool
    absent_files: tuple[str, ...]
    formats: dict[str, int]
    """Weights per storage format; empty where files are absent."""


@dataclass(frozen=True)
class DrafterSummary:
    """The Eagle3 drafter that rides in the model's cache, as the layer after its last one.

    `captured_layers` counts the target's layers run before each state that the drafter reads.
    """

    path: str
    config: Eagle3Config
    captured_layers: tuple[int, ...]
    own_embedding: bool
    own_head: bool
    weights: WeightsSummary


@dataclass(frozen=True)
class TileGroup:
    """Tiles that differ in nothing but their layer; `bytes_per_token` is of one layer, on this rank."""

    owner: Literal["target", "drafter"]
    first_layer: int
    last_layer: int
    role: str
    dtype: str
    heads: int
    local_heads: int
    dim: int
    replicated: bool
    bytes_per_token: int


@dataclass(frozen=True)
class SlotSection:
    """A part of a slot, head after head: `num_tiles` tiles in each of `local_heads` heads. Bytes."""

    heads: int
    first_head: int
    local_heads: int
    replicated: bool
    num_tiles: int
    offset: int
    head_stride: int
    num_bytes: int


@dataclass(frozen=True)
class Capacity:
    """What a page pool of `memory_gib` holds on this rank; weights and activations are not counted."""

    memory_gib: float
    pages: int
    tokens: int
    max_context: int
    sequences: dict[int, int]
    """Sequences at once, by the context (tokens) of each; contexts that the model does not reach are left out."""


@dataclass(frozen=True)
class Inspection:
    """All that `tandem inspect` says about a model folder."""

    path: str
    config: MiniMaxM3Config
    weights: WeightsSummary
    drafter: DrafterSummary | None
    kv_dtype: str
    shard_size: int
    shard_rank: int
    tokens_per_page: int
    slot_bytes: int
    bytes_per_token: int
    tokens_per_gib: int
    layout_digest: str
    tiles: tuple[TileGroup, ...]
    sections: tuple[SlotSection, ...]
    capacities: tuple[Capacity, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the inspection as plain dictionaries, lists, numbers and strings."""
        return asdict(self)

    def render(self) -> str:
        """Return the inspection as text for a terminal."""
        parts = [_model_lines(self.config), _weights_lines(self.weights), _drafter_lines(self.drafter)]
        return "\n\n".join("\n".join(lines) for lines in (*parts, _cache_lines(self)))


def inspect_model(
    path: str | Path,
    *,
    drafter: str | Path | None = "auto",
    kv_dtype: str = "bfloat16",
    shard: layout.Shard | None = None,
    memory_gib: Sequence[float] = DEFAULT_MEMORY_GIB,
) -> Inspection:
    """Inspect the model folder `path`, whose weights may be absent.

    `drafter` is the folder of a drafter with its weights; `auto` takes the folder `eagle3` inside the model's where
    there is one, None takes no drafter. `kv_dtype` is a key of `KV_DTYPES`, `shard` the part of the heads that the rank
    holds (all of them if None), `memory_gib` the pool sizes to look at. Raises `CheckpointError`, `OptionError` for an
    unknown `kv_dtype`, and `tandem.core.InvalidArgument` for a shard that the heads do not fit.
    """
    if kv_dtype not in KV_DTYPES:
        raise OptionError(f"kv_dtype is {kv_dtype!r}; allowed are {', '.join(KV_DTYPES)}")
    folder = Path(path)
    config = MiniMaxM3Config.from_pretrained(folder)
    shard = shard or layout.Shard()
    draft = _inspect_drafter(find_drafter(drafter, folder), config)
    tiles = tile_specs(config, KV_DTYPES[kv_dtype])
    if draft is not None:
        tiles += eagle3.tile_specs(draft.config, config.num_hidden_layers, KV_DTYPES[kv_dtype])
    cache = layout.CacheLayout(tiles, config.block_size, shard)
    return Inspection(
        path=str(folder),
        config=config,
        weights=_inspect_weights(folder, config),
        drafter=draft,
        kv_dtype=kv_dtype,
        shard_size=shard.size,
        shard_rank=shard.rank,
        tokens_per_page=cache.tokens_per_page,
        slot_bytes=cache.slot_bytes,
        bytes_per_token=cache.bytes_per_token,
        tokens_per_gib=_GIB // cache.slot_bytes * cache.tokens_per_page,
        layout_digest=cache.digest(),
        tiles=_tile_groups(cache, config.num_hidden_layers),
        sections=_slot_sections(cache),
        capacities=tuple(_capacity(config, cache, gib) for gib in memory_gib),
    )


def _inspect_weights(folder: Path, config: MiniMaxM3Config) -> WeightsSummary:
    specs = weight_specs(config)
    files = SafetensorsFiles(folder, TEXT_PREFIX, allow_absent=True)
    formats: dict[WeightFormat, int] = {}
    if files.absent:
        num_bytes = sum(spec.num_elements * (4 if spec.kind is WeightKind.ROUTER else 2) for spec in specs)
    else:
        weights = CheckpointWeights(files, specs, IGNORED_PREFIXES)
        formats, num_bytes = weights.formats, weights.num_bytes
    return WeightsSummary(
        num_tensors=len(specs),
        num_parameters=sum(spec.num_elements for spec in specs),
        num_bytes=num_bytes,
        complete=not files.absent,
        absent_files=tuple(files.absent),
        formats={weight_format.value: count for weight_format, count in formats.items()},
    )


def _inspect_drafter(folder: Path | None, target: MiniMaxM3Config) -> DrafterSummary | None:
    if folder is None:
        return None
    config = Eagle3Config.from_pretrained(folder)
    config.require_fit(target, folder)
    captured = config.captured_layers(target.num_hidden_layers)
    stored = Eagle3Weights(folder, config, len(captured))
    weights = stored.weights
    summary = WeightsSummary(
        num_tensors=weights.num_tensors,
        num_parameters=weights.num_parameters,
        num_bytes=weights.num_bytes,
        complete=True,
        absent_files=(),
        formats={weight_format.value: count for weight_format, count in weights.formats.items()},
    )
    return DrafterSummary(str(folder), config, captured, stored.has_embedding, stored.has_head, summary)


def _tile_groups(cache: layout.CacheLayout, num_target_layers: int) -> tuple[TileGroup, ...]:
    groups: list[TileGroup] = []
    for spec in sorted(cache.tiles, key=lambda tile: (tile.role.value, tile.layer)):
        view = cache.view(spec.layer, spec.role)
        group = TileGroup(
            owner="target" if spec.layer < num_target_layers else "drafter",
            first_layer=spec.layer,
            last_layer=spec.layer,
            role=spec.role.name,
            dtype=spec.dtype.name,
            heads=spec.heads,
            local_heads=view.heads,
            dim=spec.dim,
            replicated=spec.replicated,
            bytes_per_token=view.heads * view.token_stride,
        )
        if groups and groups[-1] == replace(group, first_layer=groups[-1].first_layer, last_layer=spec.layer - 1):
            group = replace(group, first_layer=groups.pop().first_layer)
        groups.append(group)
    return tuple(groups)


def _slot_sections(cache: layout.CacheLayout) -> tuple[SlotSection, ...]:
    return tuple(
        SlotSection(
            heads=section.global_heads,
            first_head=section.first_head,
            local_heads=section.heads,
            replicated=section.replicated,
            num_tiles=sum(
                (tile.heads, tile.replicated) == (section.global_heads, section.replicated) for tile in cache.tiles
            ),
            offset=section.offset,
            head_stride=section.head_stride,
            num_bytes=section.bytes,
        )
        for section in cache.sections
    )


def _capacity(config: MiniMaxM3Config, cache: layout.CacheLayout, memory_gib: float) -> Capacity:
    pages = int(memory_gib * _GIB) // cache.slot_bytes
    tokens = pages * cache.tokens_per_page
    longest = config.max_position_embeddings
    contexts = [context for context in _CONTEXTS if context < longest] + [longest]
    return Capacity(
        memory_gib=memory_gib,
        pages=pages,
        tokens=tokens,
        max_context=min(tokens, longest),
        sequences={context: pages // -(-context // cache.tokens_per_page) for context in contexts},
    )


def _model_lines(config: MiniMaxM3Config) -> list[str]:
    sparse, moe = config.sparse_layers, config.moe_layers
    return [
        f"MiniMax-M3, {config.num_hidden_layers} layers, hidden size {config.hidden_size}, "
        f"vocabulary {config.vocab_size}, up to {config.max_position_embeddings:,} tokens",
        f"  attention    {config.num_attention_heads} query and {config.num_key_value_heads} KV heads of "
        f"{config.head_dim}; full in layers {_layers(sparse, False)}, block-sparse in {_layers(sparse, True)}",
        f"  selection    {config.num_index_heads} index heads of {config.index_dim}; {config.topk_blocks} blocks of "
        f"{config.block_size} tokens, the last {config.local_blocks} always",
        f"  feed-forward MLP of {config.dense_intermediate_size} in layers {_layers(moe, False)}; "
        f"{config.num_experts_per_tok} of {config.num_local_experts} experts of {config.intermediate_size} and a "
        f"shared one of {config.shared_intermediate_size} in {_layers(moe, True)}",
        f"  rotary       {config.rotary_dim} of {config.head_dim} dims, theta {config.rope_theta:g}",
    ]


def _weights_lines(weights: WeightsSummary) -> list[str]:
    size = f"{weights.num_bytes / 1e9:,.1f} GB" if weights.num_bytes >= 1e9 else f"{weights.num_bytes / 1e6:,.1f} MB"
    head = f"weights: {weights.num_tensors:,} tensors, {weights.num_parameters:,} parameters, "
    if not weights.complete:
        return [head + f"{size} in bfloat16", f"  absent here: {listed(weights.absent_files)}"]
    stored = ", ".join(f"{count:,} {name}" for name, count in weights.formats.items())
    return [head + f"{size} stored ({stored})"]


def _drafter_lines(drafter: DrafterSummary | None) -> list[str]:
    if drafter is None:
        return ["drafter: none"]
    config = drafter.config
    own = [name for name, has in (("embedding", drafter.own_embedding), ("head", drafter.own_head)) if has]
    parts = f"its own {' and '.join(own)}" if own else "embedding and head are the model's"
    vocabulary = "" if config.draft_vocab_size == config.vocab_size else f", {config.draft_vocab_size} draft tokens"
    return [
        f"drafter: Eagle3, {config.num_attention_heads} query and {config.num_key_value_heads} KV heads of "
        f"{config.head_dim}, MLP of {config.intermediate_size}, reads the states after "
        f"{', '.join(map(str, drafter.captured_layers))} layers",
        f"  {parts}{vocabulary}",
        f"  {_weights_lines(drafter.weights)[0]}",
    ]


def _cache_lines(inspection: Inspection) -> list[str]:
    rank = "" if inspection.shard_size == 1 else f", rank {inspection.shard_rank} of {inspection.shard_size}"
    lines = [
        f"cache: {inspection.kv_dtype}{rank}, {inspection.bytes_per_token:,} bytes per token, slots of "
        f"{inspection.slot_bytes:,} bytes for {inspection.tokens_per_page} tokens, "
        f"{inspection.tokens_per_gib:,} tokens per GiB",
        "  tiles        layers         role     type      heads here/all  dim   bytes per token and layer",
    ]
    for tile in inspection.tiles:
        layers = f"{tile.first_layer}-{tile.last_layer}" if tile.owner == "target" else f"{tile.first_layer} (drafter)"
        heads = f"{tile.local_heads}/{tile.heads}" + (" replicated" if tile.replicated else "")
        lines.append(
            f"               {layers:<14} {tile.role:<8} {tile.dtype:<9} {heads:<15} {tile.dim:<5} "
            f"{tile.bytes_per_token:,}"
        )
    lines.append("  slot         offset        bytes         head stride   heads here/all  tiles per head")
    for section in inspection.sections:
        heads = f"{section.local_heads}/{section.heads}" + (" replicated" if section.replicated else "")
        lines.append(
            f"               {section.offset:<13,} {section.num_bytes:<13,} {section.head_stride:<13,} {heads:<15} "
            f"{section.num_tiles}"
        )
    contexts = list(inspection.capacities[0].sequences) if inspection.capacities else []
    columns = "".join(f"of {context:<11,}" for context in contexts)
    lines.append(f"  a pool of    pages      tokens        longest      sequences {columns}")
    for capacity in inspection.capacities:
        counts = "".join(f"{count:<14,}" for count in capacity.sequences.values())
        lines.append(
            f"  {capacity.memory_gib:>6g} GiB   {capacity.pages:<10,} {capacity.tokens:<13,} "
            f"{capacity.max_context:<22,} {counts}"
        )
    return [line.rstrip() for line in lines]


def _layers(flags: Sequence[bool], wanted: bool) -> str:
    """Return the layers whose flag is `wanted` as ranges: "0-2, 5", or "none"."""
    runs: list[list[int]] = []
    for layer, flag in enumerate(flags):
        if flag is wanted:
            if runs and runs[-1][1] == layer - 1:
                runs[-1][1] = layer
            else:
                runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"
