"""Splits a reply of M3 into its reasoning and its content, piece by piece.

A reply is ``<mm:think>reasoning</mm:think>content``. Where the template has opened the reasoning (`thinking_mode`
``enabled``) the opener is not part of the reply, and without a closer all of it is reasoning. Otherwise the model may
open the reasoning itself, at the very start, or begin with one stray closer, which is dropped. Tags elsewhere are text:
a tag that says nothing about the reply's parts is what the model wants to show.

A tool call that begins inside the reasoning ends it, since a model that calls has done with thinking.

Nothing but tags, and blanks before a leading tag, is ever dropped, and any split of a reply gives the same two texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from tandem.engine.chat import ThinkingMode
from tandem.engine.tokenizer import NAMESPACE, THINK_CLOSE, THINK_OPEN

BLANKS = " \t\r\n"
MAX_BLANKS = 64
"""Blanks allowed before a tag where they are allowed at all. A bound, since undecided text is held back."""

_TOOL_CALL = "<tool_call>"


@dataclass(frozen=True)
class ReasoningText:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class ContentText:
    """More of the content."""

    text: str


class _Part(Enum):
    START = 0
    REASONING = 1
    CONTENT = 2


class ReasoningParser:
    """Splits one reply.

    Args:
        thinking_mode: as the prompt was rendered.
    """

    def __init__(self, thinking_mode: ThinkingMode) -> None:
        self._prefilled = thinking_mode == "enabled"
        self._part = _Part.START
        self._held = ""

    def feed(self, text: str) -> list[ReasoningText | ContentText]:
        """What ``text`` adds, as far as no later text can change it."""
        buffer, self._held = self._held + text, ""
        deltas: list[ReasoningText | ContentText] = []
        if self._part is _Part.START:
            buffer = self._take_start(buffer)
        if self._part is _Part.REASONING:
            reasoning, buffer = self._take_reasoning(buffer)
            if reasoning:
                deltas.append(ReasoningText(reasoning))
        if self._part is _Part.CONTENT and buffer:
            deltas.append(ContentText(buffer))
        return deltas

    def finish(self) -> list[ReasoningText | ContentText]:
        """The text held back until now: the reply has ended, so it begins no tag."""
        held, self._held = self._held, ""
        if not held:
            return []
        reasons = self._part is _Part.REASONING or (self._part is _Part.START and self._prefilled)
        return [ReasoningText(held) if reasons else ContentText(held)]

    def _take_start(self, buffer: str) -> str:
        """Look for a leading tag; returns the text behind it, all of it where there is none, or holds it back."""
        begun = buffer.lstrip(BLANKS)
        allowed = (THINK_OPEN,) if self._prefilled else (THINK_OPEN, THINK_CLOSE)
        few_blanks = len(buffer) - len(begun) <= MAX_BLANKS
        for tag in allowed:
            if few_blanks and begun.startswith(tag):
                self._part = _Part.REASONING if tag == THINK_OPEN else _Part.CONTENT
                return begun[len(tag) :]
        if few_blanks and any(tag.startswith(begun) for tag in allowed):
            self._held = buffer
            return ""
        self._part = _Part.REASONING if self._prefilled else _Part.CONTENT
        return buffer

    def _take_reasoning(self, buffer: str) -> tuple[str, str]:
        """(reasoning, text behind it); the second is empty while the reasoning goes on."""
        close = buffer.find(THINK_CLOSE)
        last = len(buffer) if close < 0 else close
        start = 0
        while (start := buffer.find(NAMESPACE, start, last)) >= 0:
            rest = buffer[start + len(NAMESPACE) : start + len(NAMESPACE) + MAX_BLANKS + len(_TOOL_CALL)]
            begun = rest.lstrip(BLANKS)
            if len(rest) - len(begun) <= MAX_BLANKS and begun.startswith(_TOOL_CALL):
                self._part = _Part.CONTENT
                return buffer[:start], buffer[start:]
            if _TOOL_CALL.startswith(begun) and len(rest) - len(begun) <= MAX_BLANKS:
                self._held = buffer[start:]
                return buffer[:start], ""
            start += len(NAMESPACE)
        if close >= 0:
            self._part = _Part.CONTENT
            return buffer[:close], buffer[close + len(THINK_CLOSE) :]
        held = held_back(buffer, (THINK_CLOSE, NAMESPACE))
        self._held = buffer[len(buffer) - held :]
        return buffer[: len(buffer) - held], ""


def held_back(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of ``text`` that is the beginning, but not all, of a marker."""
    return max((n for marker in markers for n in range(1, len(marker)) if text.endswith(marker[:n])), default=0)
