"""Errors about a model folder: what is wrong with it, by name."""

from collections.abc import Iterable

_MAX_LISTED = 12


class CheckpointError(ValueError):
    """A model folder cannot be loaded; the message names the file, the key or the tensors at fault."""


class ConfigError(CheckpointError):
    """`config.json` is missing, malformed, of another architecture, or asks for what is not supported."""


class TensorMismatchError(CheckpointError):
    """The tensors of a checkpoint are not those that its configuration calls for.

    `missing`, `unexpected` and `wrong` (one line per tensor: what it is and what it should be) hold every finding; the
    message lists the first few of each and counts the rest.
    """

    def __init__(self, source: str, missing: list[str], unexpected: list[str], wrong: list[str]) -> None:
        self.missing = missing
        self.unexpected = unexpected
        self.wrong = wrong
        parts = [f"{source}: the tensors do not fit the configuration"]
        for title, findings in (("missing", missing), ("unexpected", unexpected), ("wrong shape or type", wrong)):
            if findings:
                parts.append(f"  {title} ({len(findings)}): {listed(findings)}")
        super().__init__("\n".join(parts))


class OptionError(ValueError):
    """An option of a call has a value that is not allowed; the message names both it and what is."""


def listed(names: Iterable[str]) -> str:
    """Return the first few of `names`, comma separated, and how many more there are."""
    every = list(names)
    shown = ", ".join(every[:_MAX_LISTED])
    return shown if len(every) <= _MAX_LISTED else f"{shown}, and {len(every) - _MAX_LISTED} more"
