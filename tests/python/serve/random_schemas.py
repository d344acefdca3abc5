"""Random JSON schemas of tools: with values as M3 writes them, and wilder ones to walk through."""

import json
import random
from collections.abc import Callable
from typing import Any

N = "]<]minimax[>["
Schema = dict[str, Any]
Sampler = Callable[[random.Random], tuple[Any, str]]
"""Gives a value of a schema and the text that M3 writes for it between tags."""


def tag(name: str, inside: str) -> str:
    return f"{N}<{name}>{inside}{N}</{name}>"


def plain_text(rng: random.Random, least: int = 0, most: int = 8) -> str:
    pieces = ["a", "Z", "0", " ", '"', "\\", "\n", "]<]", "<item>", "</s>", "é", "😀", "null", "{"]
    return "".join(rng.choices(pieces, k=rng.randint(least, most)))


def random_scalar(rng: random.Random) -> tuple[Schema, Sampler]:
    def of(values: list[Any]) -> Sampler:
        def sample(rng: random.Random) -> tuple[Any, str]:
            value = rng.choice(values)
            return value, value if isinstance(value, str) else json.dumps(value)

        return sample

    def text(rng: random.Random) -> tuple[str, str]:
        value = plain_text(rng)
        return value, value

    low = rng.randint(-50, 50)
    match rng.randrange(9):
        case 0:
            return {"type": "string", "description": "any"}, text
        case 1:
            values = rng.sample(["one", "two words", "", "a", "ab", 'q"uote', "näive", "1", "null"], k=3)
            return rng.choice([{"enum": values}, {"type": "string", "enum": values}]), of(values)
        case 2:
            return {"type": "string", "pattern": r"^[a-c]+/\d{2}$"}, of(["a/12", "cab/99"])
        case 3:
            return {"type": "string", "minLength": 2, "maxLength": 4}, of(["ab", "ééé", "]<]x"])
        case 4:
            return {"type": "integer", "minimum": low, "maximum": low + 20}, of(list(range(low, low + 21)))
        case 5:
            return {"type": "integer"}, of([0, -7, 10**12])
        case 6:
            return {"type": "number"}, of([0, -1.5, 2.5e-8, 1e20, 3])
        case 7:
            return {"type": "boolean"}, of([True, False])
        case _:
            return {"enum": [1, 2.5, True]}, of([1, 2.5, True])


def random_schema(rng: random.Random, depth: int) -> tuple[Schema, Sampler]:
    match rng.randrange(10) if depth else 0:
        case 0 | 1 | 2 | 3:
            return random_scalar(rng)
        case 4 | 5:
            return random_object(rng, depth - 1)
        case 6:
            schema, sample = random_schema(rng, depth - 1)
            least, most = rng.choice([(0, 3), (2, 3), (1, 1)])
            bounds: Schema = {"minItems": least, "maxItems": most} if (least, most) != (0, 3) else {}

            def items(rng: random.Random) -> tuple[Any, str]:
                found = [sample(rng) for _ in range(rng.randint(least, most))]
                return [value for value, _ in found], "".join(tag("item", text) for _, text in found)

            return {"type": "array", "items": schema} | bounds, items
        case 7:
            pairs = [random_schema(rng, depth - 1) for _ in range(2)]

            def pair(rng: random.Random) -> tuple[Any, str]:
                found = [sample(rng) for _, sample in pairs]
                return [value for value, _ in found], "\n" + "\n".join(tag("item", text) for _, text in found)

            fixed = {"type": "array", "prefixItems": [schema for schema, _ in pairs], "items": False, "minItems": 2}
            return fixed, pair
        case 8:

            def mapped(rng: random.Random) -> tuple[Any, str]:
                value = {key: rng.randint(-9, 9) for key in rng.sample(["a b", "ü", "", "<x>"], k=2)}
                return value, json.dumps(value, ensure_ascii=False)

            return {"type": "object", "additionalProperties": {"type": "integer"}}, mapped
        case _:

            def either(rng: random.Random) -> tuple[Any, str]:
                if rng.random() < 0.5:
                    value = plain_text(rng)
                    return value, value
                values = [rng.randint(0, 9) for _ in range(rng.randint(1, 3))]
                return values, "".join(tag("item", str(value)) for value in values)

            return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}, either


def random_members(rng: random.Random, depth: int) -> tuple[Schema, Callable[[random.Random], dict[str, Any]]]:
    """An object's schema, and a sampler of its members: (value, text) by key, no text for what is left out."""
    properties: dict[str, Schema] = {}
    samplers: dict[str, Sampler] = {}
    nulls: set[str] = set()
    for key in rng.sample(["key", "item", "a b", "ü", "invoke", "tool_call", "x-1"], k=rng.randint(1, 4)):
        properties[key], samplers[key] = random_schema(rng, depth)
        if rng.random() < 0.25:
            nulls.add(key)
            properties[key] = {"anyOf": [properties[key], {"type": "null"}]}
    needed = [key for key in properties if rng.random() < 0.6]

    def sample(rng: random.Random) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for key in properties:
            if rng.random() < 0.5 or (key in needed and key not in nulls):
                members[key] = samplers[key](rng)
            elif key in needed:
                members[key] = None, None
        return members

    schema = {"type": "object", "properties": properties, "required": needed}
    return schema | rng.choice([{}, {"additionalProperties": False}]), sample


def in_tags(members: dict[str, Any], between: str = "") -> str:
    return between.join(tag(key, text) for key, (_, text) in members.items() if text is not None)


def random_object(rng: random.Random, depth: int) -> tuple[Schema, Sampler]:
    schema, sample_members = random_members(rng, depth)

    def sample(rng: random.Random) -> tuple[Any, str]:
        members = sample_members(rng)
        return {key: value for key, (value, _) in members.items()}, in_tags(members, rng.choice(["", "\n"]))

    return schema, sample


def random_tools(rng: random.Random) -> dict[str, tuple[Schema, Sampler]]:
    return {name: random_object(rng, depth=2) for name in rng.sample(["f", "get.it", "a_b-c"], k=2)}


# Without samplers: every keyword that a grammar takes, some of them together.

DEFINITIONS: Schema = {
    "word": {"type": "string", "enum": ["s1", "s2"]},
    "pair": {
        "type": "object",
        "properties": {
            "x": {"type": "integer", "minimum": 0, "maximum": 9},
            "n": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
        },
        "required": ["x", "n"],
    },
    "tree": {
        "type": "object",
        "properties": {
            "v": {"type": "boolean"},
            "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
        },
        "required": ["v"],
    },
}
DIGITS: Schema = {"type": "integer", "minimum": 0, "maximum": 99}


def wild_scalar(rng: random.Random) -> Schema:
    words = rng.sample(["a", "ab", "", None, "x y"], k=rng.randint(1, 4))
    choices: list[Schema] = [
        {"type": "string", "maxLength": rng.randint(0, 5)},
        {"enum": words},
        {"type": ["integer", "null"], "minimum": -5, "maximum": 5},
        {"type": ["string", "null"], "maxLength": 3},
        {"const": rng.choice([1, "c", True, None, 2.5])},
        {"type": "string", "pattern": rng.choice(["^[ab]{1,3}$", "b", r"^\d+"]), "maxLength": 6},
        {"type": "number", "minimum": -1, "maximum": 1},
        {"type": ["integer", "boolean"], "minimum": 0, "maximum": 5},
        {"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}]},
        {"oneOf": [DIGITS, {"type": "null"}]},
        {"allOf": [{"$ref": "#/$defs/word"}], "description": "d"},
    ]
    return rng.choice(choices)


def wild_schema(rng: random.Random, depth: int) -> Schema:
    if depth == 0 or rng.random() < 0.4:
        return wild_scalar(rng)
    match rng.randrange(7):
        case 0:
            bounds = {"minItems": rng.randint(0, 2), "maxItems": rng.randint(2, 3)}
            return {"type": "array", "items": wild_schema(rng, depth - 1)} | bounds
        case 1:
            prefix = [wild_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
            rest = {"items": rng.choice([False, DIGITS]), "minItems": rng.randint(0, 1), "maxItems": 4}
            return {"type": "array", "prefixItems": prefix} | rest
        case 2:
            items = {"type": "array", "items": wild_schema(rng, depth - 1), "maxItems": 2}
            return {"anyOf": [{"type": "string", "maxLength": 4}, items, {"type": "null"}]}
        case 3:
            some = {"type": "object", "properties": {"k": wild_schema(rng, depth - 1), "z": DIGITS}, "required": ["z"]}
            return {"anyOf": [{"type": "string", "enum": ["q", "r"]}, some]}
        case 4:
            return {"anyOf": [wild_object(rng, depth - 1), rng.choice([{"type": "null"}, wild_object(rng, depth - 1)])]}
        case 5:
            return {"$ref": rng.choice(["#/$defs/pair", "#/$defs/tree"])}
    return wild_object(rng, depth - 1)


def wild_object(rng: random.Random, depth: int) -> Schema:
    keys = rng.sample(["a", "b", "item", "invoke", "tool_call", "c d"], k=rng.randint(0, 4))
    required = [key for key in keys if rng.random() < 0.6]
    schema: Schema = {"type": "object", "properties": {key: wild_schema(rng, depth) for key in keys}}
    if rng.random() < 0.1:
        required.append("named nowhere else")
    elif keys:
        schema |= rng.choice([{}, {"additionalProperties": True}, {"additionalProperties": False}])
    return schema | {"required": required}


def wild_tools(rng: random.Random) -> dict[str, Schema]:
    return {name: wild_object(rng, depth=3) | {"$defs": DEFINITIONS} for name in ("f", "g")}
