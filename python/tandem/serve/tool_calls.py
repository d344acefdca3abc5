"""Parses M3's tool calls into OpenAI's, piece by piece.

With N for the namespace token, a reply calls tools by

    N<tool_call> N<invoke name="f"> N<key>valueN</key> … N</invoke> … N</tool_call>

Objects nest as tags, arrays repeat ``N<item>…N</item>``, strings are raw; types are restored from the tool's schema.
A call's name is given as soon as its tag is complete, then fragments of its arguments whose concatenation is JSON.
Strings stream; other values wait for their closing tag. Any split of a reply gives the same calls and content.

No text is lost but blanks between tags:
- A block that does not go on with a call, and text inside a block that belongs to no value, is content.
- A value without tags ends at its own closing tag only, so a string may hold any other tag as text.
- A closing tag of something further out closes what is open inside it. One of nothing open is content.
- A call that the reply's end cuts off is left open: its fragments never make a valid document, so that nobody runs half
  a call (`ToolCallParser.unfinished`).
- An argument given twice is written twice; readers of JSON keep the last.
- M3 leaves out arguments that are null; those that their schema requires are restored.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tandem.engine.chat import ThinkingMode
from tandem.engine.tokenizer import NAMESPACE
from tandem.serve.reasoning import BLANKS, MAX_BLANKS, ContentText, ReasoningParser, ReasoningText, held_back
from tandem.serve.tool_calls_schema import ArgumentType

MAX_TAG_CHARS = 256
"""Characters between a tag's brackets; longer ones are text. A bound, since an undecided tag is held back."""
MAX_DEPTH = 100
"""Tags nested deeper are text, so that every reader of JSON can read the arguments."""

_TAG = re.compile(rf"[{BLANKS}]{{0,{MAX_BLANKS}}}<(/?)([^<>]{{1,{MAX_TAG_CHARS}}})>")
_TAG_SO_FAR = re.compile(rf"[{BLANKS}]{{0,{MAX_BLANKS}}}(<[^<>]{{0,{MAX_TAG_CHARS + 1}}})?")
_LONGEST_TAG = MAX_BLANKS + MAX_TAG_CHARS + 3
_INVOKE = re.compile(r"""invoke\s+name=(["'])(.+)\1""", re.DOTALL)


def is_member_tag(key: str) -> bool:
    """Whether a tag can have the name of this argument."""
    tag = _TAG.fullmatch(f"<{key}>")
    return tag is not None and tag[2] == key.strip() == key and not tag[1] and _INVOKE.fullmatch(key) is None


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins. ``index`` counts the reply's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of a call's arguments: a fragment of JSON text."""

    index: int
    fragment: str


CallDelta = ContentText | ToolCallStart | ToolCallArguments
Delta = ReasoningText | CallDelta


class _State(Enum):
    TEXT = 0  # outside a block
    OPENED = 1  # a block without a call yet
    BETWEEN = 2  # a block, after a call
    MEMBERS = 3  # where the next member of the innermost frame may begin
    UNDECIDED = 4  # a value of which only blanks are known
    STRING = 5  # a value that streams as a string
    SCALAR = 6  # a value that is collected


@dataclass
class _Frame:
    """An open object or array; ``keys`` are those of an object's members so far."""

    tag: str
    type: ArgumentType
    is_array: bool
    num_members: int = 0
    keys: set[str] = field(default_factory=set)


class ToolCallParser:
    """Parses the content of one reply.

    Args:
        tools: the JSON schema of each tool's parameters, by name. A call of an unknown tool is a call as well; its
            arguments are strings, objects and arrays by their form alone.
    """

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self._tools = tools
        self._state = _State.TEXT
        self._num_calls = 0
        self._frames: list[_Frame] = []
        self._value_tag = ""
        self._value_type = ArgumentType([], None)
        self._parts: list[str] = []  # undecided or collected text; what it is depends on the state
        self._held = ""
        self._deltas: list[CallDelta] = []

    @property
    def unfinished(self) -> bool:
        """Whether a call is open: after `finish`, whether the last call was cut off."""
        return bool(self._frames)

    def feed(self, text: str) -> list[CallDelta]:
        """What ``text`` adds, as far as no later text can change it."""
        buffer, self._held = self._held + text, ""
        start = 0
        while (at := buffer.find(NAMESPACE, start)) >= 0:
            self._on_text(buffer[start:at])
            start = at + len(NAMESPACE)
            tag = _TAG.match(buffer, start)
            if tag is not None and (name := tag[2].strip()):
                self._on_tag(name, closes=bool(tag[1]), raw=buffer[at : tag.end()])
                start = tag.end()
            elif tag is None and _TAG_SO_FAR.fullmatch(buffer[start : start + _LONGEST_TAG]):
                self._held = buffer[at:]
                return self._take()
            else:
                self._on_text(NAMESPACE)
        end = len(buffer) - held_back(buffer[start:], (NAMESPACE,))
        self._on_text(buffer[start:end])
        self._held = buffer[end:]
        return self._take()

    def finish(self) -> list[CallDelta]:
        """What was held back until now: the reply has ended, so it begins no tag."""
        held, self._held = self._held, ""
        self._on_text(held)
        if self._state in (_State.UNDECIDED, _State.SCALAR):
            if text := self._take_parts():
                self._write(f'"{_escape(text)}')
        elif self._state is _State.OPENED:
            self._give_back("")
        else:
            self._flush_stray()
        return self._take()

    def _on_text(self, text: str) -> None:
        if not text:
            return
        match self._state:
            case _State.TEXT:
                self._deltas.append(ContentText(text))
            case _State.OPENED if text.strip(BLANKS):
                self._give_back(text)
            case _State.UNDECIDED if text.strip(BLANKS) and self._value_type.may_be_string:
                self._write(f'"{_escape(self._take_parts() + text)}')
                self._state = _State.STRING
            case _State.STRING:
                self._write(_escape(text))
            case _:
                self._parts.append(text)
                if self._state is _State.UNDECIDED and text.strip(BLANKS):
                    self._state = _State.SCALAR

    def _on_tag(self, name: str, *, closes: bool, raw: str) -> None:
        invoked = None if closes else _INVOKE.fullmatch(name)
        match self._state:
            case _State.TEXT | _State.OPENED:
                self._on_tag_before_calls(name, invoked, closes=closes, raw=raw)
            case _State.BETWEEN | _State.MEMBERS:
                self._on_tag_in_block(name, invoked, closes=closes, raw=raw)
            case _ if closes and name == self._value_tag:
                self._end_value()
            case _State.UNDECIDED if not closes and invoked is None and self._value_type.may_be_container:
                self._take_parts()
                self._open_frame(self._value_tag, self._value_type, self._value_type.container_for(name) == "array")
                self._begin_member(name)
            case _:
                self._on_text(raw)

    def _on_tag_before_calls(self, name: str, invoked: re.Match[str] | None, *, closes: bool, raw: str) -> None:
        if self._state is _State.OPENED and invoked is not None:
            self._begin_call(invoked[2])
            return
        opens = name == "tool_call" and not closes
        if self._state is _State.OPENED:
            self._give_back("" if opens else raw)
        elif not opens:
            self._deltas.append(ContentText(raw))
        if opens:
            self._state, self._parts = _State.OPENED, [raw]

    def _on_tag_in_block(self, name: str, invoked: re.Match[str] | None, *, closes: bool, raw: str) -> None:
        level = self._open_level(name) if closes else None
        if invoked is not None:
            self._flush_stray()
            self._close_frames(0)
            self._begin_call(invoked[2])
        elif level is not None:
            self._flush_stray()
            self._close_frames(level)
        elif closes and name == "tool_call":
            self._flush_stray()
            self._close_frames(0)
            self._state = _State.TEXT
        elif closes or not self._frames:
            self._parts.append(raw)
        else:
            self._flush_stray()
            self._begin_member(name)

    def _open_level(self, tag: str) -> int | None:
        """The innermost open frame of this tag."""
        return next((i for i in reversed(range(len(self._frames))) if self._frames[i].tag == tag), None)

    def _begin_call(self, name: str) -> None:
        self._take_parts()
        self._deltas.append(ToolCallStart(self._num_calls, name))
        self._num_calls += 1
        schema = self._tools.get(name)
        self._open_frame("invoke", ArgumentType([schema], schema), is_array=False)

    def _open_frame(self, tag: str, kind: ArgumentType, is_array: bool) -> None:
        self._frames.append(_Frame(tag, kind, is_array))
        self._write("[" if is_array else "{")
        self._state = _State.MEMBERS

    def _close_frames(self, level: int) -> None:
        """Close the frames from the innermost to that at ``level``."""
        while len(self._frames) > level:
            frame = self._frames[-1]
            for key in () if frame.is_array else frame.type.required_nulls:
                if key not in frame.keys:
                    self._write(f"{self._begin_key(frame, key)}null")
            self._write("]" if frame.is_array else "}")
            self._frames.pop()
        self._state = _State.MEMBERS if self._frames else _State.BETWEEN

    def _begin_member(self, tag: str) -> None:
        frame = self._frames[-1]
        kind = frame.type.item(frame.num_members) if frame.is_array else frame.type.member(tag)
        self._write(self._begin_key(frame, tag))
        self._value_tag, self._value_type = tag, kind
        if kind.kinds == {"string"} or len(self._frames) == MAX_DEPTH:
            self._write('"')
            self._state = _State.STRING
        else:
            self._state = _State.UNDECIDED

    @staticmethod
    def _begin_key(frame: _Frame, tag: str) -> str:
        """What stands before the next member's value."""
        comma = ", " if frame.num_members else ""
        frame.num_members += 1
        if frame.is_array:
            return comma
        frame.keys.add(tag)
        return f"{comma}{json.dumps(tag, ensure_ascii=False)}: "

    def _end_value(self) -> None:
        kind = self._value_type
        if self._state is _State.UNDECIDED and kind.may_be_container and not kind.may_be_string:
            self._take_parts()
            self._open_frame(self._value_tag, kind, "array" in kind.kinds)
            self._close_frames(len(self._frames) - 1)
            return
        self._write('"' if self._state is _State.STRING else kind.to_json(self._take_parts()))
        self._state = _State.MEMBERS

    def _write(self, fragment: str) -> None:
        if fragment:
            self._deltas.append(ToolCallArguments(self._num_calls - 1, fragment))

    def _take_parts(self) -> str:
        parts, self._parts = self._parts, []
        return "".join(parts)

    def _give_back(self, text: str) -> None:
        """The block is none: it is content, with ``text`` behind it."""
        self._deltas.append(ContentText(self._take_parts() + text))
        self._state = _State.TEXT

    def _flush_stray(self) -> None:
        """Text between tags that belongs to no value is content unless it is blank."""
        text = self._take_parts()
        if text.strip(BLANKS):
            self._deltas.append(ContentText(text))

    def _take(self) -> list[CallDelta]:
        """The deltas so far, neighbours of one kind joined."""
        deltas, self._deltas = self._deltas, []
        joined: list[CallDelta] = []
        for (kind, index), group in itertools.groupby(deltas, key=_kind):
            if kind is ContentText:
                joined.append(ContentText("".join(d.text for d in group if isinstance(d, ContentText))))
            elif kind is ToolCallArguments:
                fragments = (d.fragment for d in group if isinstance(d, ToolCallArguments))
                joined.append(ToolCallArguments(index, "".join(fragments)))
            else:
                joined.extend(group)
        return joined


def _kind(delta: CallDelta) -> tuple[type, int]:
    return type(delta), -1 if isinstance(delta, ContentText) else delta.index


def _escape(text: str) -> str:
    """The inside of a JSON string; that of two texts joined is that of each, joined."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class ReplyParser:
    """Splits one reply into reasoning, content and tool calls.

    Args:
        thinking_mode: as the prompt was rendered.
        tools: the schemas of `ToolCallParser`; None leaves calls in the content, for a request that offers no tools.
    """

    def __init__(self, thinking_mode: ThinkingMode, tools: Mapping[str, Any] | None = None) -> None:
        self._reasoning = ReasoningParser(thinking_mode)
        self._calls = None if tools is None else ToolCallParser(tools)

    @property
    def unfinished(self) -> bool:
        """Whether a call is open: after `finish`, whether the last call was cut off."""
        return self._calls is not None and self._calls.unfinished

    def feed(self, text: str) -> list[Delta]:
        """What ``text`` adds, as far as no later text can change it."""
        return self._parse_calls(self._reasoning.feed(text))

    def finish(self) -> list[Delta]:
        """What was held back until now."""
        deltas = self._parse_calls(self._reasoning.finish())
        return deltas if self._calls is None else [*deltas, *self._calls.finish()]

    def _parse_calls(self, split: Sequence[ReasoningText | ContentText]) -> list[Delta]:
        deltas: list[Delta] = []
        for delta in split:
            if self._calls is None or isinstance(delta, ReasoningText):
                deltas.append(delta)
            else:
                deltas.extend(self._calls.feed(delta.text))
        return deltas


@dataclass
class ToolCall:
    """A call as a whole. ``arguments`` is JSON text."""

    name: str
    arguments: str = ""


@dataclass
class Reply:
    """A reply as a whole."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, deltas: Sequence[Delta]) -> None:
        """Append what the parser gave."""
        for delta in deltas:
            match delta:
                case ReasoningText(text):
                    self.reasoning += text
                case ContentText(text):
                    self.content += text
                case ToolCallStart(_, name):
                    self.tool_calls.append(ToolCall(name))
                case ToolCallArguments(index, fragment):
                    self.tool_calls[index].arguments += fragment


def parse_reply(text: str, thinking_mode: ThinkingMode, tools: Mapping[str, Any] | None = None) -> Reply:
    """A whole reply at once."""
    parser, reply = ReplyParser(thinking_mode, tools), Reply()
    reply.add(parser.feed(text))
    reply.add(parser.finish())
    return reply
