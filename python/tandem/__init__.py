"""Tandem: MiniMax-M3 with its drafter, served from one cache.

``from tandem import LLM, SamplingParams``. The names are imported when they are first used, so that importing the
package alone costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.engine.grammar import Grammar
    from tandem.engine.llm import LLM
    from tandem.engine.outputs import Delta, RequestOutput
    from tandem.engine.params import SamplingParams

__all__ = ["LLM", "Delta", "Grammar", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "tandem.engine.llm",
    "Delta": "tandem.engine.outputs",
    "Grammar": "tandem.engine.grammar",
    "RequestOutput": "tandem.engine.outputs",
    "SamplingParams": "tandem.engine.params",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(_HOMES[name]))[name]
