"""Replies that must call: a request's tools and its choice among them become a grammar of M3's tool calls.

The model writes its own form of calls (`tool_calls`), which the parser reads back. A grammar is needed where a call is
forced (``tool_choice`` required or a named tool), where a tool is ``strict`` and where ``parallel_tool_calls`` is
false; a reply is free otherwise. It binds the reply from its first token:

- *Forced*: reasoning as the thinking mode has it, then calls and nothing else; exactly one of a named tool. Arguments
  follow their schema, whether or not the tool is strict.
- *Free* (``tool_choice`` auto): any text, but a namespace token opens a block of calls. The arguments of strict tools
  follow their schema, those of others are anything in tags.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.engine.chat import ThinkingMode
from tandem.engine.grammar import Grammar
from tandem.engine.tokenizer import NAMESPACE, THINK_CLOSE, THINK_OPEN, Tokenizer
from tandem.serve.errors import bad_request
from tandem.serve.protocol import ChatBody, ToolSpec
from tandem.serve.tool_grammar_schema import MAX_CHOICES, PLAIN, ArgumentRules, InexpressibleError, fault_of, lacking

_THOUGHT = f"THOUGHT: {PLAIN} & {lacking(THINK_CLOSE)}"
_ANY_TAG = r"ANY_TAG: /[ \n]*<\/?[^<>]+>/ & ~/[ \n]*<\/?[ \n]*(invoke|tool_call)[ >](?s:.*)/"


def call_grammar(body: ChatBody, tokenizer: Tokenizer, thinking_mode: ThinkingMode) -> Grammar:
    """What a reply must follow for its calls to be as the request wants them; there must be a `binding_field`.

    Raises:
        ApiError: the calls cannot be bound that way; the field is named.
    """
    field, tools = binding_field(body), list(enumerate(body.tools or ()))
    assert field is not None
    namespace = tokenizer.token_id(NAMESPACE)
    if namespace is None:
        raise bad_request(f"{field}: calls can be bound only where the vocabulary has {NAMESPACE!r}", field)
    if len(tools) > MAX_CHOICES:
        raise bad_request(f"tools: {len(tools)} are given; with {field}, {MAX_CHOICES} are supported", "tools")
    choice = body.tool_choice
    is_forced = choice is not None and choice.is_forced
    name = None if choice is None else choice.name
    rules = ArgumentRules()
    try:
        calls = [
            _call(rules, tool, place, is_typed=is_forced or bool(tool.function.strict))
            for place, tool in tools
            if name in (None, tool.function.name)
        ]
    except InexpressibleError as error:
        raise bad_request(str(error), error.path) from error
    several = body.parallel_tool_calls is not False and name is None
    lines = _frame(tokenizer, thinking_mode, is_forced=is_forced, several=several)
    lines += [f"n: <[{namespace}]>", f"call: {' | '.join(calls)}", *rules.lines]
    grammar = Grammar("grammar", "\n".join(["%llguidance {}", *lines]))
    fault = fault_of("grammar", grammar.source)
    if fault is not None:
        raise bad_request(f"tools: calls cannot be bound to these schemas: {fault}", "tools")
    return grammar


def binding_field(body: ChatBody) -> str | None:
    """The field for which calls must follow a grammar; None where they are free."""
    if not body.tools or (body.tool_choice is not None and body.tool_choice.mode == "none"):
        return None
    if body.tool_choice is not None and body.tool_choice.is_forced:
        return "tool_choice"
    for place, tool in enumerate(body.tools):
        if tool.function.strict:
            return f"tools.{place}.function.strict"
    return "parallel_tool_calls" if body.parallel_tool_calls is False else None


def _call(rules: ArgumentRules, tool: ToolSpec, place: int, *, is_typed: bool) -> str:
    function = tool.function
    inside = "anything"
    if is_typed:
        inside = rules.arguments(function.parameters or {}, f"tools.{place}.function.parameters")
    return rules.named(f'n "<invoke name=\\"{function.name}\\">" {inside} n "</invoke>"', "call")


def _frame(tokenizer: Tokenizer, thinking_mode: ThinkingMode, *, is_forced: bool, several: bool) -> list[str]:
    """The rules of all but the calls themselves."""
    specials = tokenizer.special_ids - tokenizer.end_ids
    ids = {tag: tokenizer.token_id(tag) for tag in (NAMESPACE, THINK_OPEN, THINK_CLOSE)}
    opener, closer = ids[THINK_OPEN], ids[THINK_CLOSE]
    block = f'block: n "<tool_call>" nl {"(call nl)+" if several else "call nl"} n "</tool_call>"'
    anything = [f"anything: {PLAIN} (n ANY_TAG {PLAIN})*", _ANY_TAG]
    if not is_forced:
        free = f"free: {_mixed(PLAIN, specials - {ids[NAMESPACE]})}"
        return [f"start: free (block free){'*' if several else '?'}", free, block, *anything]
    if closer is None or thinking_mode == "disabled":
        return ["start: block", block]
    thought = f"thought: {_mixed('THOUGHT', specials - {ids[NAMESPACE], closer})} <[{closer}]>"
    if thinking_mode == "enabled":
        return ["start: thought block", thought, _THOUGHT, block]
    opened = "" if opener is None else f"(<[{opener}]> thought)? "
    return [f"start: {opened}block", *([thought, _THOUGHT] if opened else ()), block]


def _mixed(text: str, token_ids: Iterable[int | None]) -> str:
    """Text with any of these tokens in between."""
    listed = ",".join(str(token) for token in sorted(token for token in token_ids if token is not None))
    return f"{text} (<[{listed}]> {text})*" if listed else text
