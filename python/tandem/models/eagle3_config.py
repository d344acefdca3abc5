"""The configuration of an Eagle3 drafter, read strictly from its own `config.json`.

EAGLE 3.1 heads and classic Eagle3 heads share the format and differ in a few switches (`fc_norm`, `norm_output`,
`norm_before_fc`, `draft_vocab_size`), which are off where they are absent. As with the target, a value that is not
computed here is refused with its key, a drafter's attention window above all: served without it, a head drafts well
in short contexts and badly in long ones.
"""

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.models.config import COMMON_KEYS, MiniMaxM3Config, read_config_file
from tandem.models.errors import ConfigError, listed

_LOGGER = logging.getLogger(__name__)

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLMEagle3", "LlamaForCausalLM")

# Keys whose only supported values are listed; absent ones mean the first.
_SUPPORTED_VALUES: dict[str, tuple[object, ...]] = {
    "num_hidden_layers": (1,),
    "hidden_act": ("silu",),
    "use_aux_hidden_state": (True,),
    "norm_before_residual": (False,),
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "mlp_bias": (False,),
    "use_qk_norm": (False, None),
    "tie_word_embeddings": (False,),
    "rope_scaling": (None,),
    "rope_parameters": (None,),
    "partial_rotary_factor": (1.0, None),
    "layer_types": (None, ["full_attention"]),
    "pretraining_tp": (1,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
_REQUIRED = ("num_hidden_layers", "hidden_act")
_AUX_KEY = "eagle_aux_hidden_state_layer_ids"
# These stand at the top level or in the section `eagle_config`.
_EAGLE_KEYS = frozenset({"use_aux_hidden_state", "norm_before_fc", _AUX_KEY})
_VALUE_KEYS = frozenset(
    {
        "vocab_size",
        "draft_vocab_size",
        "hidden_size",
        "target_hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rope_theta",
        "rms_norm_eps",
        "max_position_embeddings",
        "fc_norm",
        "norm_output",
        "eagle_config",
    }
)
# None of these changes what the drafter computes.
_BOOKKEEPING_KEYS = COMMON_KEYS | {"max_window_layers"}
_OWN_FOLDER = "eagle3"


def find_drafter(drafter: str | Path | None, model: Path) -> Path | None:
    """Return the folder that `drafter` stands for, None for no drafter.

    `auto` is the folder `eagle3` inside the model folder `model`, where there is one.
    """
    if drafter == "auto":
        folder = model / _OWN_FOLDER
        return folder if folder.is_dir() else None
    return None if drafter is None else Path(drafter)


@dataclass(frozen=True)
class Eagle3Config:
    """What the drafter computes with. Names follow the checkpoint's; sizes count elements, not bytes."""

    vocab_size: int
    """The target's vocabulary, which the drafter's inputs are from."""
    draft_vocab_size: int
    """Tokens that the drafter can propose; fewer than `vocab_size` where the checkpoint has a map `d2t`."""
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    fc_norm: bool
    """Each captured state has a norm of its own before they are joined (EAGLE 3.1)."""
    norm_before_fc: bool
    """One norm over the joined states."""
    norm_output: bool
    """The hidden that the next single step takes is the normed one (EAGLE 3.1), else the one before the norm."""
    aux_layers: tuple[int, ...] | None
    """Target layers run before each captured state; None where the checkpoint leaves them to the default."""

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "Eagle3Config":
        """Read `config.json` of the drafter's folder `path`. Raises `ConfigError`."""
        return cls.from_dict(read_config_file(Path(path)))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Eagle3Config":
        """Build the configuration from the parsed `config.json`. Raises `ConfigError`."""
        values = _merged(config)
        _check_architecture(values)
        _check_supported(values)
        heads, hidden = _integer(values, "num_attention_heads"), _integer(values, "hidden_size")
        vocab = _integer(values, "vocab_size")
        parsed = cls(
            vocab_size=vocab,
            draft_vocab_size=_optional_integer(values, "draft_vocab_size", vocab),
            hidden_size=hidden,
            intermediate_size=_integer(values, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=_integer(values, "num_key_value_heads"),
            # The rule of the Llama format: without the key, heads divide the hidden size.
            head_dim=_optional_integer(values, "head_dim", hidden // heads),
            rope_theta=_number(values, "rope_theta"),
            rms_norm_eps=_number(values, "rms_norm_eps"),
            max_position_embeddings=_integer(values, "max_position_embeddings"),
            fc_norm=_flag(values, "fc_norm"),
            norm_before_fc=_flag(values, "norm_before_fc"),
            norm_output=_flag(values, "norm_output"),
            aux_layers=_aux_layers(values),
        )
        _check_sizes(parsed, values)
        return parsed

    def require_fit(self, target: MiniMaxM3Config, path: str | Path) -> None:
        """Raise `ConfigError` unless the drafter, of the folder `path`, was made for a model such as `target`."""
        for key, ours, theirs in (
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("hidden_size", self.hidden_size, target.hidden_size),
        ):
            if ours != theirs:
                raise ConfigError(f"{path}: the drafter's {key} is {ours}, the target's {theirs}")

    def captured_layers(self, num_target_layers: int, override: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return after how many target layers each state is captured: 2, n/2 and n-3 of n where nobody says otherwise.

        `override` takes the place of the checkpoint's own list. Raises `ConfigError` for a list that is not ascending
        or names more layers than there are, and for one of another length than the checkpoint's.
        """
        n = num_target_layers
        default = self.aux_layers or (2, n // 2, n - 3)
        layers = default if override is None else tuple(override)
        if len(layers) != len(default):
            raise ConfigError(f"captured layers {list(layers)}: the drafter joins {len(default)} states")
        distinct = all(before < after for before, after in itertools.pairwise(layers))
        if not distinct or layers[0] < 0 or layers[-1] > n:
            raise ConfigError(
                f"{_AUX_KEY} is {list(layers)}; it counts the layers run before each captured state, so it has to be "
                f"ascending and between 0 and the target's {n} layers"
            )
        return layers


def _merged(config: Mapping[str, Any]) -> dict[str, Any]:
    """Lift the keys of `eagle_config` to the top level, refusing those that say two things."""
    values = dict(config)
    section = values.get("eagle_config")
    if section is not None:
        if not isinstance(section, Mapping):
            raise ConfigError(f"eagle_config is {section!r}; it has to be an object")
        for key in section.keys() & _EAGLE_KEYS:
            if values.setdefault(key, section[key]) != section[key]:
                raise ConfigError(f"{key} is {values[key]!r}, and {section[key]!r} in eagle_config")
    known = _VALUE_KEYS | _SUPPORTED_VALUES.keys() | _EAGLE_KEYS | _BOOKKEEPING_KEYS
    unknown = [key for key in values if key not in known and "window" not in key]
    unknown += [f"eagle_config.{key}" for key in (section or {}) if key not in _EAGLE_KEYS]
    if unknown:
        _LOGGER.warning("drafter's config.json: unknown keys without effect: %s", listed(sorted(unknown)))
    return values


def _check_architecture(values: Mapping[str, Any]) -> None:
    names = values.get("architectures")
    if not isinstance(names, list) or not names or any(name not in SUPPORTED_ARCHITECTURES for name in names):
        raise ConfigError(
            f"drafter: architectures is {names!r}; drafters are Eagle3 heads of one layer that propose one line of "
            f"tokens, supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )


def _check_supported(values: Mapping[str, Any]) -> None:
    for key, allowed in _SUPPORTED_VALUES.items():
        if key not in values and key not in _REQUIRED:
            continue
        value = _required(values, key)
        # 1 == True in Python, but a flag given as a number is a mistake worth naming.
        if not any(value == option and isinstance(value, bool) == isinstance(option, bool) for option in allowed):
            options = " or ".join(repr(option) for option in allowed)
            raise ConfigError(f"drafter: {key} is {value!r}, which is not supported; supported: {options}")
    for key in sorted(values.keys() - _BOOKKEEPING_KEYS):
        if "window" in key and values[key] is not None and values[key] is not False:
            raise ConfigError(
                f"drafter: {key} is {values[key]!r}, which is not supported: a draft layer attends everything before it"
            )


def _check_sizes(config: Eagle3Config, values: Mapping[str, Any]) -> None:
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"drafter: num_attention_heads {config.num_attention_heads} is not a multiple of num_key_value_heads "
            f"{config.num_key_value_heads}"
        )
    if "head_dim" not in values and config.head_dim * config.num_attention_heads != config.hidden_size:
        raise ConfigError(
            f"drafter: without head_dim, num_attention_heads {config.num_attention_heads} has to divide hidden_size "
            f"{config.hidden_size}"
        )
    if config.head_dim % 2:
        raise ConfigError(f"drafter: head_dim is {config.head_dim}; its halves are rotated, so it has to be even")
    if config.draft_vocab_size > config.vocab_size:
        raise ConfigError(f"drafter: draft_vocab_size {config.draft_vocab_size} exceeds vocab_size {config.vocab_size}")
    if config.fc_norm and config.norm_before_fc:
        raise ConfigError("drafter: fc_norm and norm_before_fc are both true; only one of them can be")
    target_width = _optional_integer(values, "target_hidden_size", config.hidden_size)
    if target_width != config.hidden_size:
        raise ConfigError(
            f"drafter: target_hidden_size {target_width} is not hidden_size {config.hidden_size}; only equal widths "
            "are supported"
        )


def _required(values: Mapping[str, Any], key: str) -> Any:
    if key not in values:
        raise ConfigError(f"drafter: config.json lacks {key}, which has no safe default")
    return values[key]


def _integer(values: Mapping[str, Any], key: str) -> int:
    value = _required(values, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"drafter: {key} is {value!r}; it has to be a whole number of at least 1")
    return value


def _optional_integer(values: Mapping[str, Any], key: str, default: int) -> int:
    return default if values.get(key) is None else _integer(values, key)


def _number(values: Mapping[str, Any], key: str) -> float:
    value = _required(values, key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"drafter: {key} is {value!r}; it has to be a number above 0")
    return float(value)


def _flag(values: Mapping[str, Any], key: str) -> bool:
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"drafter: {key} is {value!r}; it has to be true or false")
    return bool(value)


def _aux_layers(values: Mapping[str, Any]) -> tuple[int, ...] | None:
    layers = values.get(_AUX_KEY)
    if layers is None:
        return None
    whole = isinstance(layers, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in layers)
    if not whole or not layers:
        raise ConfigError(f"drafter: {_AUX_KEY} is {layers!r}; it has to list numbers of layers run")
    return tuple(layers)
