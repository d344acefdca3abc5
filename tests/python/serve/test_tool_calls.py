"""Tool calls out of a reply: every split, every malformation, and nothing lost."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.serve.reasoning import MAX_BLANKS, ContentText
from tandem.serve.tool_calls import (
    MAX_DEPTH,
    MAX_TAG_CHARS,
    Reply,
    ReplyParser,
    ToolCall,
    ToolCallArguments,
    ToolCallParser,
    ToolCallStart,
    parse_reply,
)

N = "]<]minimax[>["
TOOLS: dict[str, Any] = {
    "f": {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "i": {"type": "integer"},
            "x": {"type": "number"},
            "b": {"type": "boolean"},
            "o": {"type": "object", "properties": {"i": {"type": "integer"}, "item": {"type": "boolean"}}},
            "a": {"type": "array", "items": {"type": "integer"}},
            "l": {"type": "array", "items": {"type": "string"}},
            "pair": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "integer"}]},
            "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "text_or_none": {"type": ["string", "null"]},
            "choice": {"enum": ["one", "two"]},
            "level": {"enum": [1, 2]},
            "fixed": {"const": True},
            "tree": {"$ref": "#/$defs/tree"},
            "map": {"type": "object", "additionalProperties": {"type": "number"}},
            "either": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
            "any": {},
            "odd": True,
        },
        "$defs": {
            "tree": {
                "properties": {
                    "leaf": {"type": "integer"},
                    "children": {"items": {"$ref": "#/$defs/tree"}},
                }
            }
        },
    }
}


def call(*members: str, name: str = "f") -> str:
    return f'{N}<invoke name="{name}">' + "".join(members) + f"{N}</invoke>"


def block(*calls: str) -> str:
    return f"{N}<tool_call>" + "\n".join(calls) + f"{N}</tool_call>"


def tag(name: str, *inside: str) -> str:
    return f"{N}<{name}>" + "".join(inside) + f"{N}</{name}>"


def parse(pieces: Sequence[str], tools: dict[str, Any] | None = None) -> tuple[str, list[tuple[str, str]], bool]:
    """(content, calls as name and arguments, whether the last one is unfinished) of content in pieces."""
    parser, reply = ToolCallParser(TOOLS if tools is None else tools), Reply()
    for piece in pieces:
        reply.add(parser.feed(piece))
    reply.add(parser.finish())
    return reply.content, [(made.name, made.arguments) for made in reply.tool_calls], parser.unfinished


def assert_splits_agree(text: str) -> tuple[str, list[tuple[str, str]], bool]:
    whole = parse([text])
    for cut in range(len(text) + 1):
        assert parse([text[:cut], text[cut:]]) == whole
    assert parse(list(text)) == whole
    return whole


@pytest.mark.parametrize(
    ("members", "arguments"),
    [
        ([], {}),
        ([tag("s", "a b")], {"s": "a b"}),
        ([tag("s", ' "quoted" \\ \n é😀 < > ] ')], {"s": ' "quoted" \\ \n é😀 < > ] '}),
        ([tag("s")], {"s": ""}),
        ([tag("s", "null")], {"s": "null"}),
        ([tag("s", "12")], {"s": "12"}),
        ([tag("s", tag("i", "1"))], {"s": tag("i", "1")}),
        ([tag("i", "12"), tag("x", "-1.5e3"), tag("b", "true")], {"i": 12, "x": -1500.0, "b": True}),
        ([tag("i", " \n7 ")], {"i": 7}),
        ([tag("i", "seven")], {"i": "seven"}),
        ([tag("i", "007")], {"i": "007"}),
        ([tag("i", "null")], {"i": None}),
        ([tag("i", "9" * 4001)], {"i": "9" * 4001}),
        ([tag("i")], {"i": ""}),
        ([tag("x", "NaN")], {"x": "NaN"}),
        ([tag("b", "False")], {"b": False}),
        ([tag("b", "maybe")], {"b": "maybe"}),
        ([tag("o", tag("i", "1"), "\n", tag("item", "true"))], {"o": {"i": 1, "item": True}}),
        ([tag("o")], {"o": {}}),
        ([tag("o", '{"i": [1, {}]}')], {"o": {"i": [1, {}]}}),
        ([tag("o", "{not json}")], {"o": "{not json}"}),
        ([tag("o", "[1]")], {"o": "[1]"}),
        ([tag("o", '{"i": NaN}')], {"o": '{"i": NaN}'}),
        ([tag("o", "[" * 100_000)], {"o": "[" * 100_000}),
        ([tag("a", tag("item", "1"), tag("item", "2"))], {"a": [1, 2]}),
        ([tag("a", tag("number", "1"))], {"a": [1]}),
        ([tag("a", " ")], {"a": []}),
        ([tag("a", "[1, 2]")], {"a": [1, 2]}),
        ([tag("l", tag("item", "1"), tag("item", ""))], {"l": ["1", ""]}),
        ([tag("pair", tag("item", "true"), tag("item", "2"), tag("item", "3"))], {"pair": [True, 2, "3"]}),
        ([tag("maybe", "3")], {"maybe": 3}),
        ([tag("maybe", "null")], {"maybe": None}),
        ([tag("text_or_none", "null")], {"text_or_none": "null"}),
        ([tag("choice", "two"), tag("level", "2"), tag("fixed", "true")], {"choice": "two", "level": 2, "fixed": True}),
        (
            [tag("tree", tag("leaf", "1"), tag("children", tag("item", tag("leaf", "2"))))],
            {"tree": {"leaf": 1, "children": [{"leaf": 2}]}},
        ),
        ([tag("map", tag("π", "3.14"))], {"map": {"π": 3.14}}),
        ([tag("either", tag("item", "1")), tag("either", "x")], {"either": "x"}),
        ([tag("either", tag("item", "1"))], {"either": [1]}),
        ([tag("any", "5")], {"any": "5"}),
        ([tag("any", tag("item", "5"))], {"any": ["5"]}),
        ([tag("any", " ", tag("k", tag("item", "v")))], {"any": {"k": ["v"]}}),
        ([tag("any", " x", tag("k", "v"))], {"any": " x" + tag("k", "v")}),
        ([tag("odd", "x"), tag("unknown", "y")], {"odd": "x", "unknown": "y"}),
        ([tag('a "key" with\\ marks', "v")], {'a "key" with\\ marks': "v"}),
    ],
)
def test_types_are_restored_from_the_schema(members: list[str], arguments: dict[str, Any]) -> None:
    text = block(call(*members))
    content, calls, unfinished = assert_splits_agree(text) if len(text) < 1000 else parse([text])
    assert (content, unfinished) == ("", False)
    assert [(name, json.loads(made)) for name, made in calls] == [("f", arguments)]


def test_nulls_that_are_left_out_are_restored_where_the_schema_requires_them() -> None:
    maybe = {"type": ["integer", "null"]}
    inner = {"type": "object", "properties": {"n": maybe, "m": maybe}, "required": ["n"]}
    other = {"type": "object", "properties": {"k": maybe}, "required": ["k"]}
    schema = {
        "type": "object",
        "properties": {"o": inner, "l": {"items": inner}, "either": {"anyOf": [inner, other]}, "x": maybe},
        "required": ["x", "o"],
    }
    for members, arguments in [
        ([], {"x": None}),
        ([tag("x", "1"), tag("o", tag("n", "2"))], {"x": 1, "o": {"n": 2}}),
        ([tag("o")], {"o": {"n": None}, "x": None}),
        ([tag("o", "\n", tag("m", "3"))], {"o": {"m": 3, "n": None}, "x": None}),
        ([tag("l", tag("item"), tag("item", tag("n", "4")))], {"l": [{"n": None}, {"n": 4}], "x": None}),
        ([tag("either", tag("m", "5"))], {"either": {"m": 5}, "x": None}),
        ([tag("o", "{}")], {"o": {}, "x": None}),
    ]:
        _, calls, _ = parse([block(call(*members))], {"f": schema})
        assert json.loads(calls[0][1]) == arguments
    assert parse([f'{N}<tool_call>{N}<invoke name="f">'], {"f": schema})[1:] == ([("f", "{")], True)


def test_calls_stand_between_contents_and_may_be_several() -> None:
    text = f"first {block(call(tag('s', 'x')), call(name='g'))} then {block(call(tag('i', '1')))}."
    content, calls, unfinished = assert_splits_agree(text)
    assert content == "first  then ."
    assert calls == [("f", '{"s": "x"}'), ("g", "{}"), ("f", '{"i": 1}')]
    assert not unfinished


def test_blanks_between_the_namespace_and_a_tag_and_between_tags_do_not_matter() -> None:
    loose = block(call(tag("o", tag("i", "1")), tag("b", "true"))).replace(f"{N}<", f"{N} \n<").replace(">]", "> \n]")
    assert assert_splits_agree(loose)[:2] == ("", [("f", '{"o": {"i": 1}, "b": true}')])
    spaced = f"{N}{' ' * MAX_BLANKS}<tool_call>{call()}"
    assert parse([spaced])[1] == [("f", "{}")]
    assert parse([spaced.replace(" <", "  <")])[1] == []


MALFORMED = [
    # (text, content, calls, unfinished)
    (f"{N}<tool_call>", f"{N}<tool_call>", [], False),
    (f"{N}<tool_call", f"{N}<tool_call", [], False),
    (f"a{N}", f"a{N}", [], False),
    ("a]<]mini", "a]<]mini", [], False),
    (f"{N}<tool_call> \n{N}<invoke", f"{N}<tool_call> \n{N}<invoke", [], False),
    (block(), block(), [], False),
    (block("no call"), block("no call"), [], False),
    (f"{N}<tool_call>{N}<{call()}", f"{N}<tool_call>{N}<{call()}", [], False),
    (f"{N}<tool_call>{block(call())}", f"{N}<tool_call>", [("f", "{}")], False),
    (f"{N}<other>{block(call())}", f"{N}<other>", [("f", "{}")], False),
    (call(), call(), [], False),
    ("<tool_call><invoke name='f'></invoke></tool_call>", None, [], False),
    (f"{N}<tool_call>{call()} \n", "", [("f", "{}")], False),
    (f"{N}<tool_call>{call()} stray ", " stray ", [("f", "{}")], False),
    (block(call(), " stray ", call(name="g")), "\n stray \n", [("f", "{}"), ("g", "{}")], False),
    (block(call(tag("i", "1"), "stray", tag("b", "true"))), "stray", [("f", '{"i": 1, "b": true}')], False),
    (block(call(f"{N}</nothing>")), f"{N}</nothing>", [("f", "{}")], False),
    (block(call(), f"{N}<odd>"), f"\n{N}<odd>", [("f", "{}")], False),
    (block(call(f"{N}<o>{N}<i>1{N}</i>")), "", [("f", '{"o": {"i": 1}}')], False),
    (f'{N}<tool_call>{N}<invoke name="f">{tag("i", "1")}{N}</tool_call>x', "x", [("f", '{"i": 1}')], False),
    (f'{N}<tool_call>{N}<invoke name="f">{call(name="g")}', "", [("f", "{}"), ("g", "{}")], False),
    (block(call(f"{N}<>")), f"{N}<>", [("f", "{}")], False),
    (f"{N}<tool_call>{N}<invoke name='g' >{N}</invoke>", "", [("g", "{}")], False),
    (f'{N}<tool_call>{N}<invoke name="">', f'{N}<tool_call>{N}<invoke name="">', [], False),
    # Cut off inside a call: the arguments are no document.
    (f'{N}<tool_call>{N}<invoke name="f">', "", [("f", "{")], True),
    (f'{N}<tool_call>{N}<invoke name="f">{tag("i", "1")}', "", [("f", '{"i": 1')], True),
    (f'{N}<tool_call>{N}<invoke name="f">{N}<i>12', "", [("f", '{"i": "12')], True),
    (f'{N}<tool_call>{N}<invoke name="f">{N}<i>', "", [("f", '{"i": ')], True),
    (f'{N}<tool_call>{N}<invoke name="f">{N}<s>rm -rf /tmp{N}</', "", [("f", f'{{"s": "rm -rf /tmp{N}</')], True),
    (f'{N}<tool_call>{N}<invoke name="f">{N}<s>never closed{N}</invoke>', "", None, True),
    (f'{N}<tool_call>{N}<invoke name="f">{N}<a>{call(name="g")}', "", None, True),
    (f'{N}<tool_call>{N}<invoke name="f">oops', "oops", [("f", "{")], True),
]


@pytest.mark.parametrize(("text", "content", "calls", "unfinished"), MALFORMED)
def test_what_is_no_call_comes_back_as_text(
    text: str, content: str | None, calls: list[tuple[str, str]] | None, unfinished: bool
) -> None:
    got_content, got_calls, got_unfinished = assert_splits_agree(text)
    assert got_content == (text if content is None else content)
    assert got_unfinished == unfinished
    if calls is not None:
        assert got_calls == calls
    if unfinished:
        with pytest.raises(json.JSONDecodeError):
            json.loads(got_calls[-1][1])


def test_any_soup_of_tags_loses_no_word_and_splits_the_same(py_rng: random.Random) -> None:
    names = ["s", "i", "o", "a", "item", "any", "tree", "invoke", "tool_call"]
    for _ in range(1500):
        atoms, words = [], []
        for place in range(py_rng.randint(1, 14)):
            kind = py_rng.randrange(8)
            if kind == 0:
                words.append(f"w{place}w")
                atoms.append(words[-1])
            elif kind < 6:
                slash = py_rng.choice(["", "/"])
                atoms.append(f"{N}<{slash}{py_rng.choice(names)}>")
            elif kind == 6:
                atoms.append(f'{N}<invoke name="f">')
            else:
                atoms.append(py_rng.choice([" ", "\n", N, "]<]m", "<", ">", "1", "{"]))
        text = py_rng.choice(["", f'{N}<tool_call>{N}<invoke name="f">']) + "".join(atoms)
        whole = parse([text])
        cuts = sorted(py_rng.choices(range(len(text) + 1), k=5))
        assert parse([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
        assert parse(list(text)) == whole
        content, calls, unfinished = whole
        everything = content + "".join(name + arguments for name, arguments in calls)
        assert all(everything.count(word) == 1 for word in words)
        for _, arguments in calls[: len(calls) - unfinished]:
            assert isinstance(json.loads(arguments), dict)


def random_value(rng: random.Random, depth: int) -> tuple[Any, Any, str]:
    """(a value, a schema of it, its text between tags)."""
    kind = rng.randrange(6 if depth else 4)
    if kind == 0:
        text = "".join(rng.choices(["a", "0", " ", '"', "\\", "\n", "]<", "é", "null", "\u2028", N, "<b>"], k=5))
        return text, {"type": "string"}, text
    if kind == 1:
        number = rng.randint(-(10**6), 10**6)
        return number, rng.choice([{"type": "integer"}, {"type": ["integer", "null"]}]), str(number)
    if kind == 2:
        real = rng.random() * 10 ** rng.randint(-8, 8)
        return real, {"type": "number"}, repr(real)
    if kind == 3:
        truth = rng.random() < 0.5
        return truth, {"type": "boolean"}, json.dumps(truth)
    parts = [random_value(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if kind == 4:
        items = {"type": "array", "prefixItems": [schema for _, schema, _ in parts]}
        return [value for value, _, _ in parts], items, "".join(tag("item", text) for _, _, text in parts)
    keys = rng.sample(["key", "item", "a b", "ü"], k=len(parts))
    properties = {key: schema for key, (_, schema, _) in zip(keys, parts, strict=True)}
    text = "\n".join(tag(key, text) for key, (_, _, text) in zip(keys, parts, strict=True))
    value = {key: value for key, (value, _, _) in zip(keys, parts, strict=True)}
    return value, {"type": "object", "properties": properties}, text


def test_random_arguments_come_back_as_they_were_rendered(py_rng: random.Random) -> None:
    for _ in range(400):
        value, schema, text = random_value(py_rng, depth=4)
        rendered = block(call(tag("arg", text), name="g"))
        tools = {"g": {"type": "object", "properties": {"arg": schema}}}
        content, calls, unfinished = parse([rendered], tools)
        assert (content, unfinished) == ("", False)
        assert json.loads(calls[0][1]) == {"arg": value}
        size = py_rng.randint(1, 9)
        assert parse([rendered[i : i + size] for i in range(0, len(rendered), size)], tools)[1] == calls


def test_the_name_comes_first_and_strings_stream() -> None:
    parser = ToolCallParser(TOOLS)
    assert parser.feed(f'ok {N}<tool_call>{N}<invoke name="f"') == [ContentText("ok ")]
    assert parser.feed(">") == [ToolCallStart(0, "f"), ToolCallArguments(0, "{")]
    assert parser.feed(f"{N}<s>good") == [ToolCallArguments(0, '"s": "good')]
    assert parser.feed(' day"]<') == [ToolCallArguments(0, ' day\\"')]
    assert parser.feed(f"!{N}</s>{N}<i>1") == [ToolCallArguments(0, ']<!", "i": ')]
    assert parser.feed("2") == []
    assert parser.feed(f"{N}</i>") == [ToolCallArguments(0, "12")]
    assert parser.feed(f"{N}</invoke>") == [ToolCallArguments(0, "}")]
    assert not parser.unfinished


def test_a_tag_longer_than_allowed_is_text() -> None:
    for length, is_tag in ((MAX_TAG_CHARS, True), (MAX_TAG_CHARS + 1, False)):
        key = "k" * length
        text = f'{N}<tool_call>{N}<invoke name="g">{N}<{key}>v{N}</{key}>{N}</invoke>'
        content, calls, _ = assert_splits_agree(text)
        assert json.loads(calls[0][1]) == ({key: "v"} if is_tag else {})
        assert content == ("" if is_tag else f"{N}<{key}>v{N}</{key}>")


def test_tags_nested_too_deep_are_text_that_every_reader_takes() -> None:
    depth = 50_000
    text = block(call(f"{N}<a1>" * depth + f"{N}</a1>" * depth, name="g"))
    _, calls, _ = parse([text])
    nested, levels = json.loads(calls[0][1]), 0
    while isinstance(nested, dict):
        nested, levels = next(iter(nested.values())), levels + 1
    assert levels == MAX_DEPTH
    assert nested.startswith(f"{N}<a1>{N}<a1>")


@pytest.mark.parametrize(
    "unit",
    [N, f"{N}<", "]", f"{N}<tool_call>", f"{N}<tool_call> ", f"{N}<i>", f"{N}<i>1", f"{N}<o>", f"{N}</o>", "x", " "],
)
@pytest.mark.parametrize("opening", ["", f'{N}<tool_call>{N}<invoke name="f">', f"{N}<tool_call>"])
def test_the_work_grows_with_the_text_only(unit: str, opening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Characters that pass through the parser's own steps, per character fed, one at a time: looked at again only while
    # held back, which has a bound, and joined or given out once.
    def characters_handled(repeats: int) -> int:
        handled = 0
        feed = ToolCallParser.feed

        def counting_feed(parser: ToolCallParser, text: str) -> list[Any]:
            nonlocal handled
            handled += len(parser._held) + len(text)
            deltas = feed(parser, text)
            handled += sum(len(d.fragment) for d in deltas if isinstance(d, ToolCallArguments))
            handled += sum(len(d.text) for d in deltas if isinstance(d, ContentText))
            return deltas

        monkeypatch.setattr(ToolCallParser, "feed", counting_feed)
        parse(list(opening + unit * repeats))
        monkeypatch.setattr(ToolCallParser, "feed", feed)
        return handled

    few, many = characters_handled(50), characters_handled(200)
    assert many <= 4.5 * few + 5000
    assert few <= (len(opening) + 50 * len(unit)) * 2 * (MAX_BLANKS + MAX_TAG_CHARS)


def test_a_schema_of_many_branches_or_circles_ends() -> None:
    circle: dict[str, Any] = {"anyOf": [{"$ref": "#"}, {"$ref": "#/anyOf/0"}, {"$ref": "elsewhere"}, {"$ref": 5}]}
    circle["properties"] = {"k": {"$ref": "#/properties/k"}}
    wide: dict[str, Any] = {"anyOf": [{"anyOf": [{"type": "integer"}] * 1000}] * 1000}
    for schema in (circle, wide, [], 5, None, {"properties": 5}, {"properties": {"k": {"type": 5, "enum": 3}}}):
        content, calls, unfinished = parse([block(call(tag("k", "1")))], {"f": schema})
        assert (content, unfinished) == ("", False)
        assert json.loads(calls[0][1]) == {"k": "1"}


def test_a_reply_as_a_whole_has_reasoning_content_and_calls() -> None:
    text = f"think{N} a bit</mm:think>so: {block(call(tag('i', '3')))}"
    expected = Reply(f"think{N} a bit", "so: ", [ToolCall("f", '{"i": 3}')])
    assert parse_reply(text, "enabled", TOOLS) == expected
    for cut in range(len(text) + 1):
        parser, reply = ReplyParser("enabled", TOOLS), Reply()
        for piece in (text[:cut], text[cut:]):
            reply.add(parser.feed(piece))
        reply.add(parser.finish())
        assert reply == expected
        assert not parser.unfinished


def test_a_call_inside_the_reasoning_ends_it_and_without_tools_calls_are_content() -> None:
    text = f"I call{block(call())}"
    assert parse_reply(text, "enabled", TOOLS) == Reply("I call", "", [ToolCall("f", "{}")])
    assert parse_reply(text, "enabled") == Reply("I call", block(call()), [])
    parser = ReplyParser("disabled", TOOLS)
    parser.feed(text[:-30])
    parser.finish()
    assert parser.unfinished
