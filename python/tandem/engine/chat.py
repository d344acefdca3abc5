"""Conversations to prompts: the checkpoint's own chat template, or M3's layout where it has none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from tandem.engine.errors import InvalidChatError
from tandem.engine.tokenizer import END_OF_TURN, THINK_CLOSE, THINK_OPEN, Tokenizer, read_json

if TYPE_CHECKING:
    import jinja2

BEGIN = "]~!b["
ROLE = "]~b]"
_ROLE_NAMES = {"system": "system", "user": "user", "assistant": "ai", "tool": "tool"}

ThinkingMode = Literal["enabled", "disabled", "adaptive"]


class Message(TypedDict):
    """One turn: ``role`` is system, user, assistant or tool."""

    role: str
    content: str


class ChatTemplate:
    """Renders a conversation.

    Args:
        source: jinja source of the template; None takes M3's layout: `]~!b[` once, then per turn
            ``]~b]role\\n content [e~[\\n``, and to open the reply ``]~b]ai\\n`` with the opening tag of the reasoning.
        special_tokens: strings that the template may use, such as ``bos_token``.
    """

    def __init__(self, source: str | None = None, special_tokens: Mapping[str, str] | None = None) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> ChatTemplate:
        """``chat_template.jinja``, else ``chat_template`` of ``tokenizer_config.json``, else M3's layout."""
        path = Path(directory) / "chat_template.jinja"
        config = read_json(Path(directory) / "tokenizer_config.json")
        source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
        names = ("bos_token", "eos_token", "pad_token")
        tokens = {name: config[name] for name in names if isinstance(config.get(name), str)}
        return cls(source, tokens)

    def takes(self, name: str) -> bool:
        """Whether a variable, or a field of a message, can change the prompt: the template's source has the word."""
        if self._source is None:
            return name in ("messages", "role", "content", "add_generation_prompt", "thinking_mode")
        return re.search(rf"\b{re.escape(name)}\b", self._source) is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        thinking_mode: ThinkingMode = "enabled",
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: the turns, oldest first.
            add_generation_prompt: end with the opening of the reply.
            thinking_mode: ``enabled`` opens the reply's reasoning, ``disabled`` opens the reply behind it, ``adaptive``
                leaves the choice to the model.
            variables: further variables of the checkpoint's template.

        Raises:
            InvalidChatError: no messages, an unknown role, or the template refuses the conversation.
        """
        _check(messages)
        if self._source is None:
            if variables:
                raise InvalidChatError(f"the built-in chat layout takes no {', '.join(sorted(variables))}")
            return _render_m3(messages, add_generation_prompt, thinking_mode)
        return self._render_jinja(messages, add_generation_prompt, thinking_mode, variables)

    def _render_jinja(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        thinking_mode: str,
        variables: Mapping[str, Any],
    ) -> str:
        import jinja2

        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                thinking_mode=thinking_mode,
                **self._special_tokens,
                **variables,
            )
        # Beside its own errors a template may raise those of what it does with a conversation's values.
        except (jinja2.TemplateError, TypeError, KeyError, ArithmeticError) as error:
            raise InvalidChatError(f"the chat template failed: {error}") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise InvalidChatError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = refuse
        environment.filters["tojson"] = _to_json
        assert self._source is not None
        return environment.from_string(self._source)

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of `render`."""
        return tokenizer.encode(self.render(messages, **options))


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """The filter that chat templates are written for, as transformers has it: without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise InvalidChatError("a conversation needs at least one message")
    for message in messages:
        role = message.get("role")
        if role not in _ROLE_NAMES:
            raise InvalidChatError(f"role={role!r} is not allowed: one of {', '.join(_ROLE_NAMES)}")
        if not isinstance(message.get("content"), str):
            raise InvalidChatError(f"the content of a {role} message must be a string")


def _render_m3(messages: Sequence[Message], add_generation_prompt: bool, thinking_mode: str) -> str:
    parts = [BEGIN]
    parts += [f"{ROLE}{_ROLE_NAMES[turn['role']]}\n{turn['content']}{END_OF_TURN}\n" for turn in messages]
    if add_generation_prompt:
        opening = {"enabled": THINK_OPEN, "disabled": THINK_CLOSE, "adaptive": ""}
        if thinking_mode not in opening:
            raise InvalidChatError(f"thinking_mode={thinking_mode!r} is not allowed: one of {', '.join(opening)}")
        parts.append(f"{ROLE}ai\n{opening[thinking_mode]}")
    return "".join(parts)
