"""The configuration of MiniMax-M3's text model, read strictly from a checkpoint's own `config.json`.

Two forms are read: the official one, in which the text model sits in `text_config` beside a vision model that is
ignored, and the bare text configuration. In both, the sparse attention has its own section `sparse_attention_config`.

What a key may do:

* A key that changes the mathematics must be present; there are no defaults to guess from.
* A value that this implementation does not compute is refused with the key and the value.
* A key that is known at one level and given at another is refused: it would have no effect there.
* A key that nobody here knows is reported by one warning and has no effect.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.models.errors import ConfigError, listed

_LOGGER = logging.getLogger(__name__)

SUPPORTED_ARCHITECTURES = ("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3SparseForCausalLM")

# Keys whose only supported values are listed. "Required" ones tell MiniMax-M3 from its relatives.
_REQUIRED_TEXT_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("swigluoai",),
    "use_gemma_norm": (True,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_head",),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "n_shared_experts": (1,),
}
_OPTIONAL_TEXT_VALUES: dict[str, tuple[object, ...]] = {
    "attention_output_gate": (False,),
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "rope_scaling": (None,),
    "rope_parameters": (None,),
    "sliding_window": (None,),
    "n_group": (None, 1),
    "topk_group": (None, 1),
    "norm_topk_prob": (True,),
    "swiglu_beta": (1.0,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
_REQUIRED_SPARSE_VALUES: dict[str, tuple[object, ...]] = {
    "use_sparse_attention": (True,),
    "sparse_init_block": (0,),
    "sparse_score_type": ("max",),
}
_OPTIONAL_SPARSE_VALUES: dict[str, tuple[object, ...]] = {
    "use_index_cache": (False, None),
    "index_topk_freq": (1, None),
}
# Other spellings of the sparse section; read flat from the text configuration they would silently have no effect here.
_OTHER_SPELLINGS = {
    "index_n_heads": "sparse_attention_config.sparse_num_index_heads",
    "index_head_dim": "sparse_attention_config.sparse_index_dim",
    "index_block_size": "sparse_attention_config.sparse_block_size",
    "index_topk_blocks": "sparse_attention_config.sparse_topk_blocks",
    "index_local_blocks": "sparse_attention_config.sparse_local_block",
    "layer_types": "sparse_attention_config.sparse_attention_freq",
    "mlp_layer_types": "moe_layer_freq",
    "num_experts": "num_local_experts",
    "sparse_init_blocks": "sparse_attention_config.sparse_init_block",
    "sparse_local_blocks": "sparse_attention_config.sparse_local_block",
    "sparse_local_tokens": "sparse_attention_config.sparse_local_block",
}
_VALUE_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rotary_dim",
    "partial_rotary_factor",
    "rope_theta",
    "rms_norm_eps",
    "max_position_embeddings",
    "dense_intermediate_size",
    "intermediate_size",
    "shared_intermediate_size",
    "num_local_experts",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "moe_layer_freq",
    "swiglu_alpha",
    "swiglu_limit",
    "sparse_attention_config",
)
_SPARSE_VALUE_KEYS = (
    "sparse_attention_freq",
    "sparse_disable_index_value",
    "sparse_num_index_heads",
    "sparse_index_dim",
    "sparse_block_size",
    "sparse_topk_blocks",
    "sparse_local_block",
)
# What any model's configuration may say beside its mathematics.
COMMON_KEYS = frozenset(
    {
        "architectures",
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "auto_map",
        "_name_or_path",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "quantization_config",
        "use_cache",
        "initializer_range",
        "attention_dropout",
    }
)
# Legal at the wrapper's level and at the text model's; none of them changes the text model's mathematics.
_BOOKKEEPING_KEYS = COMMON_KEYS | {
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "num_mtp_modules",
    "num_nextn_predict_layers",
}
_WRAPPER_KEYS = frozenset(
    {
        "text_config",
        "vision_config",
        "image_token_index",
        "video_token_index",
        "image_token_id",
        "video_token_id",
        "projector_hidden_size",
        "tie_word_embeddings",
    }
)
_TEXT_KEYS = frozenset(_VALUE_KEYS) | _REQUIRED_TEXT_VALUES.keys() | _OPTIONAL_TEXT_VALUES.keys()
_SPARSE_KEYS = frozenset(_SPARSE_VALUE_KEYS) | _REQUIRED_SPARSE_VALUES.keys() | _OPTIONAL_SPARSE_VALUES.keys()


@dataclass(frozen=True)
class MiniMaxM3Config:
    """What the text model computes with. Names follow the checkpoint's; sizes count elements, not bytes."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    dense_intermediate_size: int
    intermediate_size: int
    shared_intermediate_size: int
    num_local_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_alpha: float
    swiglu_limit: float
    moe_layers: tuple[bool, ...]
    """Per layer: mixture of experts (true) or one dense MLP."""
    sparse_layers: tuple[bool, ...]
    """Per layer: block-sparse attention with an index branch (true) or full attention."""
    index_dim: int
    """Width of an index head. There are as many index query heads as KV heads, and one index key."""
    block_size: int
    """Tokens of one selection block, and so of one cache page."""
    topk_blocks: int
    local_blocks: int
    """The last blocks of a query's past, its own included, that are always selected; they count among `topk_blocks`."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def num_index_heads(self) -> int:
        """Index query heads of a sparse layer: one per KV head."""
        return self.num_key_value_heads

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "MiniMaxM3Config":
        """Read `config.json` of the model folder `path`. Raises `ConfigError`."""
        return cls.from_dict(read_config_file(Path(path)))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "MiniMaxM3Config":
        """Build the configuration from the parsed `config.json`, wrapped or bare. Raises `ConfigError`."""
        _check_architecture(config)
        if "text_config" in config:
            wrapper = _Section("config.json", config)
            wrapper.refuse_misplaced(_TEXT_KEYS - _WRAPPER_KEYS, "text_config")
            wrapper.refuse_misplaced(_SPARSE_KEYS, "text_config.sparse_attention_config")
            wrapper.refuse_other_spellings()
            wrapper.require_values({"tie_word_embeddings": (False,)}, required=False)
            wrapper.warn_unknown(_WRAPPER_KEYS | _BOOKKEEPING_KEYS)
            text = wrapper.section("text_config")
        else:
            text = _Section("config.json", config)
        return _parse_text(text, config)


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the parsed `config.json` of the model folder `path`. Raises `ConfigError` that names what is missing."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; a model is a folder with config.json and its safetensors files")
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path} has no config.json")
    return read_json_object(file)


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`. Raises `ConfigError` that names the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds a JSON {type(value).__name__}, not an object")
    return value


class _Section:
    """One level of the file, with the checks that name a key by its full path."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name = name
        self.values = values

    def path(self, key: str) -> str:
        return key if self.name == "config.json" else f"{self.name}.{key}"

    def get(self, key: str) -> Any:
        if key not in self.values:
            raise ConfigError(f"config.json lacks {self.path(key)}, which has no safe default")
        return self.values[key]

    def section(self, key: str) -> "_Section":
        value = self.get(key)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.path(key)} is {value!r}; it has to be an object")
        return _Section(self.path(key), value)

    def integer(self, key: str, at_least: int = 1) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise ConfigError(f"{self.path(key)} is {value!r}; it has to be a whole number of at least {at_least}")
        return value

    def number(self, key: str) -> float:
        value = self.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ConfigError(f"{self.path(key)} is {value!r}; it has to be a number above 0")
        return float(value)

    def flags(self, key: str, length: int) -> tuple[bool, ...]:
        value = self.get(key)
        if not isinstance(value, list) or len(value) != length or any(flag not in (0, 1) for flag in value):
            raise ConfigError(f"{self.path(key)} is {value!r}; it has to list {length} values of 0 or 1, one per layer")
        return tuple(bool(flag) for flag in value)

    def require_values(self, allowed: Mapping[str, tuple[object, ...]], *, required: bool) -> None:
        for key, values in allowed.items():
            if not required and key not in self.values:
                continue
            value = self.get(key)
            # 1 == True in Python, but a flag given as a number is a mistake worth naming.
            if not any(value == option and isinstance(value, bool) == isinstance(option, bool) for option in values):
                options = " or ".join(repr(option) for option in values)
                raise ConfigError(f"{self.path(key)} is {value!r}, which is not supported; supported: {options}")

    def refuse_misplaced(self, keys: frozenset[str], belongs: str) -> None:
        for key in sorted(keys & self.values.keys()):
            raise ConfigError(
                f"{self.path(key)} has no effect there: this key belongs in {belongs} (given: {self.values[key]!r})"
            )

    def refuse_other_spellings(self) -> None:
        for key in sorted(_OTHER_SPELLINGS.keys() & self.values.keys()):
            raise ConfigError(
                f"{self.path(key)} has no effect: MiniMax-M3 checkpoints spell it {_OTHER_SPELLINGS[key]} "
                f"(given: {self.values[key]!r})"
            )

    def warn_unknown(self, known: frozenset[str]) -> None:
        unknown = sorted(self.values.keys() - known)
        if unknown:
            _LOGGER.warning("%s: unknown keys without effect: %s", self.name, listed(unknown))


def _check_architecture(config: Mapping[str, Any]) -> None:
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ConfigError(f"config.json: architectures is {names!r}; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")
    for name in names:
        if name not in SUPPORTED_ARCHITECTURES:
            raise ConfigError(
                f"config.json: architecture {name!r} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
            )


def _parse_text(text: _Section, whole: Mapping[str, Any]) -> MiniMaxM3Config:
    text.refuse_misplaced(_SPARSE_KEYS, "sparse_attention_config")
    text.refuse_other_spellings()
    text.require_values(_REQUIRED_TEXT_VALUES, required=True)
    text.require_values(_OPTIONAL_TEXT_VALUES, required=False)
    text.warn_unknown(_TEXT_KEYS | _BOOKKEEPING_KEYS)
    sparse = text.section("sparse_attention_config")
    sparse.refuse_misplaced(_TEXT_KEYS, text.name if text.name != "config.json" else "the top level")
    sparse.refuse_other_spellings()
    sparse.require_values(_REQUIRED_SPARSE_VALUES, required=True)
    sparse.require_values(_OPTIONAL_SPARSE_VALUES, required=False)
    sparse.warn_unknown(_SPARSE_KEYS)

    num_layers = text.integer("num_hidden_layers")
    sparse_layers = sparse.flags("sparse_attention_freq", num_layers)
    for layer, disabled in enumerate(sparse.flags("sparse_disable_index_value", num_layers)):
        if sparse_layers[layer] and not disabled:
            key = sparse.path(f"sparse_disable_index_value[{layer}]")
            raise ConfigError(f"{key} is 0: the value path of the index branch is not supported")
    config = MiniMaxM3Config(
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=text.integer("num_attention_heads"),
        num_key_value_heads=text.integer("num_key_value_heads"),
        head_dim=text.integer("head_dim"),
        rotary_dim=text.integer("rotary_dim", at_least=2),
        rope_theta=text.number("rope_theta"),
        rms_norm_eps=text.number("rms_norm_eps"),
        max_position_embeddings=text.integer("max_position_embeddings"),
        dense_intermediate_size=text.integer("dense_intermediate_size"),
        intermediate_size=text.integer("intermediate_size"),
        shared_intermediate_size=text.integer("shared_intermediate_size"),
        num_local_experts=text.integer("num_local_experts"),
        num_experts_per_tok=text.integer("num_experts_per_tok"),
        routed_scaling_factor=text.number("routed_scaling_factor"),
        swiglu_alpha=text.number("swiglu_alpha"),
        swiglu_limit=text.number("swiglu_limit"),
        moe_layers=text.flags("moe_layer_freq", num_layers),
        sparse_layers=sparse_layers,
        index_dim=sparse.integer("sparse_index_dim"),
        block_size=sparse.integer("sparse_block_size"),
        topk_blocks=sparse.integer("sparse_topk_blocks"),
        local_blocks=sparse.integer("sparse_local_block", at_least=0),
        bos_token_id=_token_ids("bos_token_id", text.values, whole)[0],
        eos_token_ids=tuple(token for token in _token_ids("eos_token_id", text.values, whole) if token is not None),
    )
    _check_geometry(config, text, sparse)
    return config


def _token_ids(key: str, text: Mapping[str, Any], whole: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the id or ids under `key`, the text model's before the wrapper's; `(None,)` where neither names one."""
    value = text.get(key, whole.get(key))
    ids = value if isinstance(value, list) and value else [value]
    for token in ids:
        if token is not None and (not isinstance(token, int) or isinstance(token, bool) or token < 0):
            raise ConfigError(f"{key} is {value!r}; it has to be a token id, a list of token ids, or null")
    return tuple(ids)


def _check_geometry(config: MiniMaxM3Config, text: _Section, sparse: _Section) -> None:
    """Refuse sizes that contradict each other, naming both keys and both values."""
    num_index_heads = sparse.integer("sparse_num_index_heads")
    if num_index_heads != config.num_key_value_heads:
        raise ConfigError(
            f"{sparse.path('sparse_num_index_heads')} is {num_index_heads} and num_key_value_heads is "
            f"{config.num_key_value_heads}; only equal numbers are supported"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads {config.num_attention_heads} is not a multiple of num_key_value_heads "
            f"{config.num_key_value_heads}"
        )
    factor = text.number("partial_rotary_factor")
    if config.rotary_dim != factor * config.head_dim:
        raise ConfigError(
            f"rotary_dim {config.rotary_dim} is not partial_rotary_factor {factor} of head_dim {config.head_dim}"
        )
    for name, width in (("head_dim", config.head_dim), ("sparse_index_dim", config.index_dim)):
        if config.rotary_dim % 2 or config.rotary_dim > width:
            raise ConfigError(f"rotary_dim {config.rotary_dim} has to be even and at most {name} {width}")
    if config.num_experts_per_tok > config.num_local_experts:
        raise ConfigError(
            f"num_experts_per_tok {config.num_experts_per_tok} exceeds num_local_experts {config.num_local_experts}"
        )
    if config.local_blocks > config.topk_blocks:
        raise ConfigError(f"sparse_local_block {config.local_blocks} exceeds sparse_topk_blocks {config.topk_blocks}")
