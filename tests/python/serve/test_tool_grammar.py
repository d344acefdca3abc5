"""Grammars of tool calls: what M3 would write is accepted and read back, nothing else is, and any walk is calls."""

import json
import random
import string
from typing import Any

import jsonschema
import numpy as np
import pytest

from tandem.engine.chat import ThinkingMode
from tandem.engine.errors import GrammarError
from tandem.engine.grammar import Grammar, GrammarCompiler, GrammarMatcher, unpack_masks
from tandem.engine.tokenizer import END_OF_TURN, THINK_CLOSE, THINK_OPEN, Tokenizer
from tandem.serve.errors import ApiError
from tandem.serve.protocol import ChatBody
from tandem.serve.tool_calls import parse_reply
from tandem.serve.tool_grammar import binding_field, call_grammar
from tests.python.engine.byte_tokenizer import byte_ids, byte_tokenizer
from tests.python.serve.random_schemas import N, Schema, in_tags, random_members, random_tools, tag, wild_tools

TOKENIZER = byte_tokenizer(extra_tokens=[N])
VOCAB_SIZE = 300
NAMESPACE_ID = TOKENIZER.token_id(N)
(END_ID,) = TOKENIZER.end_ids
COMPILER = GrammarCompiler(TOKENIZER, VOCAB_SIZE, TOKENIZER.end_ids)


def request_of(tools: dict[str, Any], **fields: Any) -> ChatBody:
    """``tools``: the parameters of each, by name."""
    listed = [
        {"type": "function", "function": {"name": name, "parameters": parameters}} for name, parameters in tools.items()
    ]
    for tool in listed:
        tool["function"]["strict"] = bool(fields.get("strict"))  # type: ignore[index]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": listed}
    return ChatBody.model_validate(body | {name: value for name, value in fields.items() if name != "strict"})


def grammar_of(tools: dict[str, Any], mode: ThinkingMode = "disabled", **fields: Any) -> Grammar:
    return call_grammar(request_of(tools, **fields), TOKENIZER, mode)


def required(tools: dict[str, Any]) -> Grammar:
    return grammar_of(tools, tool_choice="required")


def allowed_next(matcher: GrammarMatcher) -> Any:
    return np.flatnonzero(unpack_masks(matcher.masks([]), VOCAB_SIZE)[0])


def accepts(grammar: Grammar, text: str | list[int]) -> bool:
    """Whether a reply may be this text and no more."""
    matcher = COMPILER.matcher(grammar)
    try:
        for token in TOKENIZER.encode(text) if isinstance(text, str) else text:
            matcher.advance(token)
    except GrammarError:
        return False
    return matcher.complete or END_ID in allowed_next(matcher)


def call(inside: str, name: str = "f") -> str:
    return f'{N}<invoke name="{name}">{inside}{N}</invoke>'


def block(*calls: str) -> str:
    """As M3's chat template writes calls."""
    return f"{N}<tool_call>\n" + "".join(f"{each}\n" for each in calls) + f"{N}</tool_call>"


def arguments_of(text: str, tools: dict[str, Any], mode: ThinkingMode = "disabled") -> list[tuple[str, Any]]:
    reply = parse_reply(text, mode, tools)
    return [(made.name, json.loads(made.arguments)) for made in reply.tool_calls]


def test_what_m3_would_write_is_accepted_and_read_back(py_rng: random.Random) -> None:
    for _ in range(15):
        tools = random_tools(py_rng)
        schemas = {name: schema for name, (schema, _) in tools.items()}
        grammar = required(schemas)
        for _ in range(4):
            names = py_rng.choices(list(tools), k=py_rng.randint(1, 3))
            values = [tools[name][1](py_rng) for name in names]
            text = block(*(call(inside, name) for name, (_, inside) in zip(names, values, strict=True)))
            assert accepts(grammar, text), (text, schemas)
            expected = [(name, value) for name, (value, _) in zip(names, values, strict=True)]
            assert arguments_of(text, schemas) == expected
            for name, value in expected:
                jsonschema.validate(value, schemas[name])


def test_a_call_without_a_required_argument_is_rejected(py_rng: random.Random) -> None:
    num_tried = 0
    for _ in range(40):
        schema, sample = random_members(py_rng, depth=1)
        members = sample(py_rng)
        for key in schema["required"]:
            if members[key][1] is None or {"type": "null"} in schema["properties"][key].get("anyOf", []):
                continue
            text = block(call(in_tags({other: member for other, member in members.items() if other != key})))
            others = [name for name in schema["required"] if name != key]
            assert accepts(required({"f": schema | {"required": others}}), text)
            assert not accepts(required({"f": schema}), text)
            num_tried += 1
    assert num_tried >= 20


FIXED: Schema = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer", "minimum": 0, "maximum": 9},
        "e": {"enum": ["on", "off"]},
        "o": {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        "l": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
    },
    "required": ["i"],
}
GOOD = tag("i", "7")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no call",
        f"Well: {block(call(GOOD))}",
        f"{block(call(GOOD))} there",
        f"\n{block(call(GOOD))}",
        block(call(GOOD)) * 2,
        block(),
        block(call(GOOD, "unknown")),
        block(call(GOOD, "")),
        block(call(GOOD)).removesuffix(f"{N}</tool_call>"),
        block(call(GOOD).removesuffix(f"{N}</invoke>")),
        block(call("stray" + GOOD)),
        block(call(GOOD), "stray"),
        block(call("")),
        block(call(tag("i", ""))),
        block(call(tag("i", "12"))),
        block(call(tag("i", "seven"))),
        block(call(tag("i", '"7"'))),
        block(call(tag("i", "7.5"))),
        block(call(tag("i", " 7"))),
        block(call(tag("i", "null"))),
        block(call(GOOD + GOOD)),
        block(call(GOOD + tag("unknown", "x"))),
        block(call(GOOD + tag("s", "x"))),  # the order is that of the schema
        block(call(tag("s", f"a{N}b") + GOOD)),
        block(call(tag("s", tag("i", "1")) + GOOD)),
        block(call(GOOD + tag("e", "maybe"))),
        block(call(GOOD + tag("e", "onoff"))),
        block(call(GOOD + tag("o", ""))),
        block(call(GOOD + tag("o", '{"b": true}'))),
        block(call(GOOD + tag("o", tag("b", "True")))),
        block(call(GOOD + tag("l", tag("item", "1") * 3))),
        block(call(GOOD + tag("l", tag("other", "1")))),
        block(call(GOOD + tag("l", "[1]"))),
        block(call(GOOD)).replace("</i>", "</s>"),
    ],
)
def test_anything_else_is_rejected(text: str) -> None:
    assert not accepts(required({"f": FIXED}), text)


def test_a_namespace_spelled_letter_by_letter_is_no_tag_and_no_text() -> None:
    spelled = byte_ids(N.encode())
    head, tail = f'{N}<tool_call>{N}<invoke name="f">{N}<s>', f"{N}</s>{GOOD}{N}</invoke>{N}</tool_call>"
    as_token = TOKENIZER.encode(head)
    assert accepts(required({"f": FIXED}), as_token + TOKENIZER.encode("x" + tail))
    assert not accepts(required({"f": FIXED}), as_token + spelled + TOKENIZER.encode(tail))
    assert not accepts(required({"f": FIXED}), byte_ids(head.encode()) + TOKENIZER.encode("x" + tail))
    free = grammar_of({"f": FIXED}, strict=True)
    assert accepts(free, TOKENIZER.encode("x") + spelled[:-1])
    assert not accepts(free, TOKENIZER.encode("x") + spelled)


def test_a_named_tool_is_called_once_and_no_other() -> None:
    tools = {"f": FIXED, "g": {}}
    grammar = grammar_of(tools, tool_choice={"type": "function", "function": {"name": "g"}})
    assert accepts(grammar, block(call("", "g")))
    assert not accepts(grammar, block(call("", "g"), call("", "g")))
    assert not accepts(grammar, block(call(GOOD, "f")))


def test_parallel_calls_are_several_unless_forbidden() -> None:
    tools = {"f": FIXED, "g": {}}
    several = block(call(GOOD), call("", "g"))
    assert accepts(required(tools), several)
    one = grammar_of(tools, tool_choice="required", parallel_tool_calls=False)
    assert accepts(one, block(call("", "g")))
    assert not accepts(one, several)
    for fields in ({}, {"strict": True}):
        free = grammar_of(tools, parallel_tool_calls=False, **fields)
        assert accepts(free, "none")
        assert accepts(free, f"a {block(call(GOOD))} b")
        assert not accepts(free, several)
        assert not accepts(free, block(call(GOOD)) * 2)


def test_free_text_may_hold_calls_and_those_of_strict_tools_follow_their_schema() -> None:
    grammar = grammar_of({"f": FIXED}, strict=True)
    texts = ["", "no call", "a ]<] b", block(call(GOOD)), f"I think.{THINK_CLOSE}So: {block(call(GOOD))} and"]
    assert all(accepts(grammar, text) for text in [*texts, "".join(texts)])
    bad = [block(call(tag("i", "x"))), f"a{N}b", f"{N}<tool_cal>", block(call(GOOD, "g")), f"a{block()}", block(GOOD)]
    assert not any(accepts(grammar, text) for text in bad)


def test_calls_of_tools_that_are_not_strict_are_free_beside_strict_ones() -> None:
    body = request_of({"f": FIXED, "loose": FIXED})
    tools = [tool.model_copy(deep=True) for tool in body.tools or []]
    strict = tools[0].function.model_copy(update={"strict": True})
    body = body.model_copy(update={"tools": [tools[0].model_copy(update={"function": strict}), tools[1]]})
    grammar = call_grammar(body, TOKENIZER, "disabled")
    wild = tag("i", "x") + " stray " + tag("any", tag("item", "1") + f"{N}  <deep>{N}</deep>")
    assert accepts(grammar, block(call(wild, "loose"), call(GOOD, "f")))
    assert not accepts(grammar, block(call(wild, "f")))
    assert not accepts(grammar, block(call(f'{N}<invoke name="f">', "loose")))


@pytest.mark.parametrize("mode", ["enabled", "adaptive", "disabled"])
def test_a_forced_call_comes_behind_the_reasoning_of_its_mode(mode: ThinkingMode) -> None:
    grammar = grammar_of({"f": FIXED}, mode, tool_choice="required")
    calls = block(call(GOOD))
    replies = {
        f"hm, {{1}} <x>{THINK_CLOSE}{calls}": "enabled",
        f"{THINK_CLOSE}{calls}": "enabled",
        f"{THINK_OPEN}hm{THINK_CLOSE}{calls}": "adaptive",
        calls: "not enabled",
    }
    for reply, modes in replies.items():
        fits = mode == modes or (modes == "not enabled" and mode != "enabled")
        # An opener of the model's own in front of the reasoning is dropped by the parser in every mode.
        fits = fits or (mode == "enabled" and reply.startswith(THINK_OPEN))
        assert accepts(grammar, reply) == fits, reply
        if fits:
            assert arguments_of(reply, {"f": FIXED}, mode) == [("f", {"i": 7})]
            assert parse_reply(reply, mode, {"f": FIXED}).content == ""
    for broken in (f"hm{calls}{THINK_CLOSE}{calls}", f"hm{THINK_CLOSE} so {calls}", f"hm{N}{THINK_CLOSE}{calls}", "hm"):
        assert not accepts(grammar, broken)


def test_without_a_need_a_reply_is_not_bound() -> None:
    for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": "none", "strict": True}, {"parallel_tool_calls": True}):
        assert binding_field(request_of({"f": FIXED}, **fields)) is None


def walk(grammar: Grammar, rng: random.Random, most: int) -> tuple[str, bool]:
    """(text, whether it ended) of tokens drawn at random among the allowed ones; tags and ends are drawn more often."""
    matcher, tokens = COMPILER.matcher(grammar), list[int]()
    while len(tokens) < most and not matcher.complete:
        allowed = allowed_next(matcher).tolist()
        turns = [token for token in allowed if token in (NAMESPACE_ID, END_ID)]
        token = rng.choice(turns if turns and rng.random() < 0.15 else allowed)
        if token == END_ID:
            return TOKENIZER.decode(tokens), True
        matcher.advance(token)
        tokens.append(token)
    return TOKENIZER.decode(tokens), matcher.complete


def assert_walk_is_valid(rng: random.Random, mode: ThinkingMode, choice: str) -> tuple[bool, int]:
    """(whether the walk ended, number of its calls)."""
    schemas = wild_tools(rng)
    text, ended = walk(grammar_of(schemas, mode, tool_choice=choice, strict=True), rng, 1500)
    reply = parse_reply(text, mode, schemas)
    for made in reply.tool_calls if ended else reply.tool_calls[:-1]:
        jsonschema.validate(json.loads(made.arguments), schemas[made.name])
    if ended:
        assert N not in reply.content + reply.reasoning
    if choice == "required" and ended:
        assert reply.content == ""
        assert reply.tool_calls
    return ended, len(reply.tool_calls)


@pytest.mark.parametrize("mode", ["enabled", "adaptive", "disabled"])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_any_walk_through_the_grammar_is_valid_calls(mode: ThinkingMode, choice: str, py_rng: random.Random) -> None:
    walks = [assert_walk_is_valid(py_rng, mode, choice) for _ in range(14)]
    assert sum(ended for ended, _ in walks) >= 10
    assert sum(num_calls for _, num_calls in walks) >= 5


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["enabled", "adaptive", "disabled"])
def test_any_of_many_walks_is_valid_calls(mode: ThinkingMode, py_rng: random.Random) -> None:
    for choice in ("required", "auto"):
        for _ in range(150):
            assert_walk_is_valid(py_rng, mode, choice)


TREE: Schema = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}, "maybe": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["root", "maybe"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["v"],
        }
    },
}


def test_references_may_go_in_circles_and_nulls_are_left_out() -> None:
    grammar = required({"f": TREE})
    leaf = tag("v", "1")
    inner = tag("v", "2") + tag("next", tag("item", leaf) + tag("item", leaf + tag("next", "")))
    assert accepts(grammar, text := block(call(tag("root", inner))))
    node = {"v": 2, "next": [{"v": 1}, {"v": 1, "next": []}]}
    assert arguments_of(text, {"f": TREE}) == [("f", {"root": node, "maybe": None})]
    assert not accepts(grammar, block(call(tag("root", tag("v", "2") + tag("next", tag("item", ""))))))
    assert not accepts(grammar, block(call(tag("root", leaf) + tag("maybe", "null"))))


def test_what_tags_cannot_say_is_json() -> None:
    one_of = {"oneOf": [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab"]}
    referring: Schema = {
        "type": "object",
        "properties": {"m": {"type": "object", "additionalProperties": {"$ref": "#/$defs/d~1e"}}},
        "$defs": {"d/e": {"anyOf": [{"type": "integer"}, {"$ref": "#/properties/m"}]}},
    }
    for schema, good, bad in [
        ({"properties": {"m": {"type": "object"}}}, ['{"a":{}}', "{}"], ["x", "[]", "{ }"]),
        ({"properties": {"m": {"type": ["array", "object"]}}}, ["[1, {}]", "{}"], ["1"]),
        ({"properties": {"m": {"anyOf": one_of["oneOf"]}}}, ['{"k": "a"}'], ['{"k": "c"}']),
        (referring, ['{"x": 1, "y": {"z": {}}}'], ['{"x": "y"}']),
    ]:
        grammar = required({"f": schema})
        for text in good:
            rendered = block(call(tag("m", text)))
            assert accepts(grammar, rendered), text
            assert arguments_of(rendered, {"f": schema}) == [("f", {"m": json.loads(text)})]
        assert not any(accepts(grammar, block(call(tag("m", text)))) for text in bad)


def test_several_types_beside_a_string() -> None:
    schema = {"properties": {"a": {"type": ["string", "array"], "items": {"type": "integer"}, "uniqueItems": False}}}
    for text, value in [("x", "x"), ("", ""), ("[1]", "[1]"), (tag("item", "1"), [1])]:
        assert accepts(required({"f": schema}), block(call(tag("a", text))))
        assert arguments_of(block(call(tag("a", text))), {"f": schema}) == [("f", {"a": value})]
    assert not accepts(required({"f": schema}), block(call(tag("a", tag("item", "x")))))


def test_an_item_that_may_be_null_is_json_since_it_cannot_be_left_out() -> None:
    item = {"type": ["object", "null"], "properties": {"k": {"type": "integer"}}, "required": ["k"]}
    schema = {"properties": {"l": {"type": "array", "items": item}}}
    text = block(call(tag("l", tag("item", "null") + tag("item", '{"k": 1}'))))
    assert accepts(required({"f": schema}), text)
    assert arguments_of(text, {"f": schema}) == [("f", {"l": [None, {"k": 1}]})]


REFUSED = [
    # (parameters, the place that the error names below the parameters)
    ({"type": "array"}, ""),
    ({"anyOf": [{"type": "object"}, {"type": "object"}]}, ""),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, ".additionalProperties"),
    ({"properties": 5}, ".properties"),
    ({"properties": {"a": 5}}, ".properties.a"),
    ({"properties": {"a": {}}, "required": "a"}, ".required"),
    ({"properties": {"a": {}}, "required": [1]}, ".required"),
    ({"properties": {"a": False}, "required": ["a"]}, ".properties.a"),
    ({"properties": {"a": {}}, "required": ["b"], "additionalProperties": False}, ".properties.b"),
    ({"properties": {"a": {}}, "minProperties": 1}, ".minProperties"),
    ({"properties": {f"p{i}": {} for i in range(501)}}, ""),
    ({"properties": {"a": {"type": "array", "prefixItems": [False], "minItems": 1}}}, ".properties.a.prefixItems.0"),
    ({"properties": {"a<b": {}}}, ".properties.a<b"),
    ({"properties": {" a": {}}}, ".properties. a"),
    ({"properties": {'invoke name="x"': {}}}, '.properties.invoke name="x"'),
    ({"properties": {"a": {"$ref": "#/nowhere"}}}, ".properties.a.$ref"),
    ({"properties": {"a": {"$ref": "http://x"}}}, ".properties.a.$ref"),
    ({"properties": {"a": {"$ref": "#/properties/a"}}}, ".properties.a"),
    ({"properties": {"a": {"allOf": [{}, {}]}}}, ".properties.a.allOf"),
    ({"properties": {"a": {"type": "string", "pattern": "("}}}, ".properties.a.pattern"),
    ({"properties": {"a": {"type": "string", "pattern": "a)|(b"}}}, ".properties.a.pattern"),
    ({"properties": {"a": {"type": "string", "pattern": "a(?=b)"}}}, ".properties.a.pattern"),
    ({"properties": {"a": {"type": "string", "minLength": -1}}}, ".properties.a.minLength"),
    ({"properties": {"a": {"type": "string", "maxLength": "3"}}}, ".properties.a.maxLength"),
    ({"properties": {"a": {"type": "string", "not": {}}}}, ".properties.a.not"),
    ({"properties": {"a": {"enum": ["a", 1]}}}, ".properties.a"),
    ({"properties": {"a": {"enum": ["a"], "minLength": 2}}}, ".properties.a"),
    ({"properties": {"a": {"enum": [f"a{N}"]}}}, ".properties.a"),
    ({"properties": {"a": {"type": "string", "minLength": 3, "maxLength": 2}}}, ".properties.a"),
    ({"properties": {"a": {"type": ["string", "array"], "unevaluatedItems": False}}}, ".properties.a.unevaluatedItems"),
    ({"properties": {"a": {"anyOf": [{"enum": ["a"]}, {"type": "integer"}]}}}, ".properties.a.anyOf.1"),
    ({"properties": {"a": {"oneOf": [{"type": "string"}, {"enum": ["a"]}]}}}, ".properties.a.oneOf"),
    ({"properties": {"a": {"anyOf": [{"type": "string"}], "minLength": 2}}}, ".properties.a.anyOf"),
    (
        {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "array", "maxItems": 1}]}}},
        ".properties.a.anyOf.2",
    ),
    ({"properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}}}, ".properties.a"),
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, ".properties.a"),
    ({"properties": {"a": {"type": "array", "minItems": 3, "maxItems": 2}}}, ".properties.a"),
    ({"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "object"}]}}}, ".properties.a.anyOf.1"),
    (
        {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"b": {}}}]}}},
        ".properties.a.anyOf.1",
    ),
]


@pytest.mark.parametrize(("parameters", "place"), REFUSED, ids=[json.dumps(schema)[:60] for schema, _ in REFUSED])
def test_a_schema_that_cannot_be_followed_is_refused_by_its_place(parameters: Schema, place: str) -> None:
    for fields in ({"tool_choice": "required"}, {"strict": True}):
        with pytest.raises(ApiError) as caught:
            grammar_of({"fine": {}, "f": parameters}, **fields)
        assert caught.value.param == f"tools.1.function.parameters{place}"
        assert caught.value.status == 400
        assert "\n" not in caught.value.message
        assert len(caught.value.message) < 500


def test_patterns_are_found_anywhere_unless_anchored() -> None:
    for pattern, good, bad in [
        ("b", ["b", "abc", "a\nb"], ["", "a"]),
        ("^b", ["b", "bc\n"], ["ab"]),
        (r"b\$$", ["ab$"], ["b", "b$c"]),
        (r"b\\$", ["ab\\"], ["ab"]),
        ("^a|b$", ["a", "b"], ["c", "cac"]),
        (r"^[\w/]\W\d\/$", ["a-1/", "/ 2/"], ["é-1/", "a-٣/"]),
        ("^a\nb$", ["a\nb"], ["ab"]),
    ]:
        grammar = required({"f": {"properties": {"s": {"type": "string", "pattern": pattern}}, "required": ["s"]}})
        for texts, expected in ((good, True), (bad, False)):
            for text in texts:
                assert accepts(grammar, block(call(tag("s", text)))) == expected, (pattern, text)


def test_many_tools_and_long_schemas_are_taken() -> None:
    words = ["".join(pair) for pair in zip(string.ascii_lowercase * 40, map(str, range(1000)), strict=False)]
    chain: Schema = {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": {}}
    for i in range(600):
        chain["$defs"][str(i)] = {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}}
    chain["$defs"]["600"] = {"type": "boolean"}
    tools = {f"t{i}": {"properties": {f"p{j}": {"type": "integer"} for j in range(20)}} for i in range(60)}
    tools |= {"words": {"properties": {"w": {"enum": words}}, "required": ["w"]}, "chain": chain}
    grammar = required(tools)
    assert accepts(grammar, block(call(tag("p0", "1") + tag("p19", "2"), "t59"), call(tag("w", words[-1]), "words")))
    assert not accepts(grammar, block(call(tag("w", "none"), "words")))


def test_where_the_vocabulary_has_no_namespace_the_field_at_fault_is_named() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    for fields, field in [
        ({"tool_choice": named, "strict": True}, "tool_choice"),
        ({"strict": True}, "tools.0.function.strict"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ]:
        with pytest.raises(ApiError) as caught:
            call_grammar(request_of({"f": {}}, **fields), byte_tokenizer(), "disabled")
        assert caught.value.param == field


@pytest.mark.parametrize("special", [True, False])
def test_the_namespace_may_be_a_special_token_or_not(special: bool) -> None:
    description = json.loads(TOKENIZER.to_json())
    for token in description["added_tokens"]:
        token["special"] = special or token["content"] == END_OF_TURN
    tokenizer = Tokenizer(json.dumps(description))
    body = request_of({"f": FIXED}, tool_choice="required")
    grammar = call_grammar(body, tokenizer, "enabled")
    matcher = GrammarCompiler(tokenizer, VOCAB_SIZE, tokenizer.end_ids).matcher(grammar)
    for token in tokenizer.encode(f"I call{THINK_CLOSE}{block(call(tag('s', 'a') + GOOD))}"):
        matcher.advance(token)
    assert matcher.complete
