"""The canary's prompts and the answers kept for them: files of JSON lines.

A line has ``name``, ``max_tokens``, one of ``prompt``, ``messages`` and ``token_ids``, and where an answer was kept
``expected``; `CanaryLine` has the fields. A model folder may bring its own as ``canary.jsonl``; the ones beside this
module are texts that repeat themselves, so that any model that can copy knows how they go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tandem.engine.chat import ChatTemplate
from tandem.engine.errors import InvalidTokenIdError, check_token_ids
from tandem.engine.tokenizer import Tokenizer
from tandem.serve.canary import CanaryAnswer, CanaryPrompt

FILE_NAME = "canary.jsonl"

_Count = Annotated[int, msgspec.Meta(ge=0)]


class CanaryPromptsError(ValueError):
    """A file of canary prompts that cannot be used; the message names the file, the line or prompt, and the field."""


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Expected(msgspec.Struct, forbid_unknown_fields=True):
    """The answer of a sound server: its greedy tokens, and what became of the drafts on the cold route."""

    token_ids: Annotated[list[int], msgspec.Meta(min_length=1)]
    num_rounds: _Count
    num_drafted: _Count
    num_accepted: _Count


class CanaryLine(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One line of a file. ``messages`` are rendered by the model's chat template, which opens the reply."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=2)]
    prompt: str | None = None
    messages: list[Turn] | None = None
    token_ids: list[int] | None = None
    expected: Expected | None = None


@dataclass(frozen=True)
class CanaryPrompts:
    """What is replayed, from one file."""

    path: Path
    lines: Sequence[CanaryLine]
    prompts: Sequence[CanaryPrompt]

    @property
    def expected(self) -> dict[str, CanaryAnswer]:
        """The kept answers, by prompt."""
        kept = {line.name: line.expected for line in self.lines}
        return {
            name: CanaryAnswer(tuple(e.token_ids), 0, e.num_rounds, e.num_drafted, e.num_accepted)
            for name, e in kept.items()
            if e is not None
        }

    def check(self, *, vocab_size: int, tokens_per_page: int, max_model_len: int) -> None:
        """Raises `CanaryPromptsError` for a prompt that an engine of these sizes cannot replay on both routes."""
        for prompt in self.prompts:
            at = f"{self.path}: canary prompt {prompt.name}"
            count = len(prompt.token_ids)
            if count < tokens_per_page:
                raise CanaryPromptsError(
                    f"{at} has {count} tokens; at least one page of the cache, {tokens_per_page}, is needed, or "
                    "nothing of it could be found cached"
                )
            if count + prompt.max_tokens > max_model_len:
                raise CanaryPromptsError(
                    f"{at} has {count} tokens and max_tokens={prompt.max_tokens}; together at most {max_model_len} are "
                    "allowed"
                )
            try:
                check_token_ids("token_ids", prompt.token_ids, vocab_size)
            except InvalidTokenIdError as error:
                raise CanaryPromptsError(f"{at}: {error}") from error


def default_path(model_path: Path) -> Path:
    """The file that the model folder brings, else the one for any model."""
    own = model_path / FILE_NAME
    return own if own.is_file() else Path(__file__).with_name(FILE_NAME)


def read_prompts(path: Path, tokenizer: Tokenizer, chat_template: ChatTemplate) -> CanaryPrompts:
    """Read a file.

    Raises:
        CanaryPromptsError: it holds no prompt, a malformed line, or a name twice.
    """
    lines: dict[str, CanaryLine] = {}
    prompts = []
    for number, data in enumerate(path.read_bytes().splitlines(), 1):
        if not data.strip():
            continue
        try:
            line = msgspec.json.decode(data, type=CanaryLine)
            if line.name in lines:
                raise ValueError(f"name {line.name!r} is there twice")
            prompts.append(CanaryPrompt(line.name, tuple(_token_ids(line, tokenizer, chat_template)), line.max_tokens))
        except ValueError as error:
            raise CanaryPromptsError(f"{path}, line {number}: {error}") from error
        lines[line.name] = line
    if not lines:
        raise CanaryPromptsError(f"{path} holds no prompt; one JSON object a line is expected")
    return CanaryPrompts(path, list(lines.values()), prompts)


def _token_ids(line: CanaryLine, tokenizer: Tokenizer, chat_template: ChatTemplate) -> list[int]:
    """Raises a `ValueError` unless exactly one of the fields is given."""
    given = [name for name in ("prompt", "messages", "token_ids") if getattr(line, name) is not None]
    if len(given) != 1:
        raise ValueError(f"one of prompt, messages and token_ids is needed, given are {', '.join(given) or 'none'}")
    if line.token_ids is not None:
        return line.token_ids
    if line.messages is not None:
        return chat_template.encode(tokenizer, [{"role": m.role, "content": m.content} for m in line.messages])
    assert line.prompt is not None
    return tokenizer.encode(line.prompt)


def with_answers(lines: Sequence[CanaryLine], answers: Mapping[str, CanaryAnswer]) -> list[CanaryLine]:
    """The lines with these answers for the expected ones."""
    kept = {
        name: Expected(list(a.token_ids), a.num_rounds, a.num_drafted, a.num_accepted) for name, a in answers.items()
    }
    return [msgspec.structs.replace(line, expected=kept[line.name]) for line in lines]
