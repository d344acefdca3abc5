"""Grammar of a call's arguments: Lark rules (llguidance) by which M3's tags follow a tool's JSON schema.

What a rule lets through is read back by `ToolCallParser` as the value that was meant, and the schema allows it:
- Text is a string wherever one may stand, so a number beside a free string is written as a string. Strings hold no
  namespace token. ``format`` is an annotation, as in JSON Schema itself.
- Objects and arrays are tags where their schema says just what may stand in them; what tags cannot say (maps, several
  kinds of objects, …) is JSON text, which the parser takes as it is. The arguments themselves are tags always.
- Members come in the order of ``properties``, each at most once, and only those that the schema names. One that may be
  null may be left out: M3 leaves nulls out, and the parser restores those that are required.
- Anything else is refused with its place in the schema (`InexpressibleError`).
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

from tandem.engine.tokenizer import NAMESPACE
from tandem.serve.tool_calls import is_member_tag
from tandem.serve.tool_calls_schema import MAX_ALTERNATIVES, ArgumentType, referred

_BRANCHES = ("$ref", "anyOf", "oneOf", "allOf")
_OF_OBJECTS = frozenset({"properties", "required", "additionalProperties"})
_OF_ARRAYS = frozenset({"items", "prefixItems", "minItems", "maxItems"})
_OF_STRINGS = frozenset({"minLength", "maxLength", "pattern", "enum", "const"})
_NEVER = frozenset(
    {
        *("not", "if", "then", "else", "$dynamicRef"),
        *("contains", "uniqueItems", "unevaluatedItems"),
        *("patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"),
        *("dependentRequired", "dependentSchemas", "dependencies"),
    }
)
_HARMLESS_IF_FALSE = frozenset({"uniqueItems", "unevaluatedProperties"})
_CONSTRAINTS = _OF_OBJECTS | _OF_ARRAYS | _OF_STRINGS | _NEVER | {"type"} | set(_BRANCHES)
# As the model is used to see it; without bounds, blanks could go on for ever.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
# In patterns: JSON Schema's classes are ASCII (ECMA-262), those of the matching Unicode; a slash ends one of Lark's.
_REWRITTEN = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]", "/": r"\/"}

_MAX_FAULT_CHARS = 300

MAX_CHOICES = 500
"""Properties of an object, and tools of a request. The matching keeps up to 2,000 ways open, two for each of them."""

PLAIN = "PLAIN"
"""The terminal of any text, the empty one included, in which no tag begins."""


def lacking(text: str) -> str:
    """A terminal's expression: it holds this text nowhere."""
    escaped = re.escape(text).replace("/", r"\/")
    return f"~/(?s:.*){escaped}(?s:.*)/"


class InexpressibleError(ValueError):
    """A schema that the tags cannot follow. ``path`` is its place, ``reason`` what is wrong with it."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.path = path


class ArgumentRules:
    """The rules of all tools of one grammar. A rule ``n`` for the namespace token is the grammar's own.

    Attributes:
        lines: the rules so far.
    """

    def __init__(self) -> None:
        self.lines = ['nl: "\\n"?', f"{PLAIN}: /(?s:.*)/ & {lacking(NAMESPACE)}"]
        self._names: dict[str, str] = {}
        self._num_names = 0

    def arguments(self, schema: Any, path: str) -> str:
        """The name of a rule for what stands inside a call's tags.

        Args:
            schema: of the tool's parameters.
            path: the schema's place in the request.

        Raises:
            InexpressibleError: the tags cannot follow the schema.
        """
        return _Arguments(self, schema).rule(path)

    def named(self, body: str, prefix: str) -> str:
        """The name of a rule or terminal with this body, made where there is none."""
        name = self._names.get(f"{prefix} {body}")
        if name is None:
            name = self._names[f"{prefix} {body}"] = self.reserve(prefix)
            self.lines.append(f"{name}: {body}")
        return name

    def json(self, schema: str, path: str) -> str:
        """The name of a rule for the JSON texts that a schema, as JSON text, allows."""
        body = f"%json {schema}"
        if f"j {body}" not in self._names and (fault := fault_of("json_schema", schema)) is not None:
            raise InexpressibleError(path, f"cannot be followed: {fault}")
        return self.named(body, "j")

    def reserve(self, prefix: str) -> str:
        """A name for a rule that is added later."""
        self._num_names += 1
        return f"{prefix}{self._num_names}"


class _Arguments:
    """The rules of one tool."""

    def __init__(self, rules: ArgumentRules, root: Any) -> None:
        self._rules = rules
        self._root = root
        self._containers: dict[tuple[int, bool], str] = {}
        self._waiting: deque[tuple[str, dict[str, Any], str, bool]] = deque()

    def rule(self, path: str) -> str:
        leaves = self._leaves(self._root, path)
        if len(leaves) != 1 or self._kinds(leaves[0][0]) - {"object"}:
            raise InexpressibleError(path, "must be one object")
        leaf, path = leaves[0]
        if not leaf.get("properties") and leaf.get("additionalProperties", False) is not False:
            raise InexpressibleError(f"{path}.additionalProperties", "must be false: arguments are those of properties")
        fault = self._tag_fault(leaf | {"additionalProperties": False}, path)
        if fault is not None:
            raise fault
        name = self._container(leaf, path)
        while self._waiting:
            # One after the other, since a chain of references may be longer than Python's stack.
            rule, leaf, path, some = self._waiting.popleft()
            is_array = "array" in self._kinds(leaf)
            body = self._items(leaf, path, some) if is_array else self._members(leaf, path, some)
            self._rules.lines.append(f"{rule}: {body}")
        return name

    def _kinds(self, schema: Any) -> frozenset[str]:
        return ArgumentType([schema], self._root).kinds

    def _leaves(self, schema: Any, path: str) -> list[tuple[dict[str, Any], str]]:
        """The alternatives of a schema, each with its place; those without references and branches of their own."""
        waiting, seen = [(schema, path)], set[int]()
        leaves: list[tuple[dict[str, Any], str]] = []
        while waiting:
            schema, path = waiting.pop()
            if schema is False or id(schema) in seen:
                continue
            if schema is True:
                schema = {}
            if not isinstance(schema, dict):
                raise InexpressibleError(path, "must be a schema: an object or a boolean")
            seen.add(id(schema))
            if len(seen) > MAX_ALTERNATIVES:
                raise InexpressibleError(path, f"has more than {MAX_ALTERNATIVES} alternatives")
            words = [word for word in _BRANCHES if word in schema]
            if not words:
                leaves.append((schema, path))
                continue
            besides = sorted(_CONSTRAINTS & set(schema) - {words[0]})
            if besides:
                raise InexpressibleError(f"{path}.{words[0]}", f"cannot be combined with {', '.join(besides)}")
            waiting += reversed(self._branches(schema, words[0], path))
        if not leaves:
            raise InexpressibleError(path, "allows nothing")
        return leaves

    def _branches(self, schema: Mapping[str, Any], word: str, path: str) -> list[tuple[Any, str]]:
        if word == "$ref":
            target = referred(schema[word], self._root)
            if target is None:
                raise InexpressibleError(f"{path}.$ref", f"{schema[word]!r} leads to no part of the schema")
            return [(target, path)]
        several = _checked(schema, word, list, [], path)
        if word == "allOf" and len(several) != 1:
            raise InexpressibleError(f"{path}.allOf", "may have one branch only")
        if word == "oneOf":
            self._check_exclusive(several, path)
        return [(branch, f"{path}.{word}.{i}") for i, branch in enumerate(several)]

    def _check_exclusive(self, branches: list[Any], path: str) -> None:
        """No value may fit two branches, so that any that fits is right."""
        seen: list[tuple[frozenset[str], set[str] | None]] = []
        for branch in branches[:MAX_ALTERNATIVES]:
            kinds, values = self._kinds(branch), _values(branch) if isinstance(branch, dict) else None
            listed = None if values is None else {json.dumps(value) for value in values}
            for other_kinds, other_listed in seen:
                of_other_kinds = kinds and other_kinds and not kinds & other_kinds
                if not of_other_kinds and (listed is None or other_listed is None or listed & other_listed):
                    raise InexpressibleError(f"{path}.oneOf", "has branches that may overlap; anyOf is supported")
            seen.append((kinds, listed))

    def _tag_fault(self, leaf: dict[str, Any], path: str) -> InexpressibleError | None:
        """Why an object or array cannot be written as tags."""
        allowed = _OF_ARRAYS if "array" in self._kinds(leaf) else _OF_OBJECTS
        words = _unsupported(_CONSTRAINTS - allowed - {"type"}, leaf)
        if words:
            return InexpressibleError(f"{path}.{words[0]}", "is not supported here")
        if allowed is _OF_ARRAYS:
            return None
        properties = _checked(leaf, "properties", dict, {}, path)
        if not properties and leaf.get("additionalProperties") is not False:
            return InexpressibleError(path, "names no properties")
        if len(properties) > MAX_CHOICES:
            return InexpressibleError(path, f"names {len(properties)} properties; {MAX_CHOICES} are supported")
        for key in [*properties, *_required(leaf, path)]:
            if not is_member_tag(key):
                return InexpressibleError(f"{path}.properties.{key}", "cannot be the name of a tag")
        return None

    def _container(self, leaf: dict[str, Any], path: str, *, some: bool = False) -> str:
        """The rule of an object's or an array's inside; ``some`` forbids an empty one."""
        key = (id(leaf), some)
        if key not in self._containers:
            self._containers[key] = self._rules.reserve("c")
            self._waiting.append((self._containers[key], leaf, path, some))
        return self._containers[key]

    def _members(self, leaf: dict[str, Any], path: str, some: bool) -> str:
        properties = _checked(leaf, "properties", dict, {}, path)
        required = _required(leaf, path)
        parts, num_forced = ["nl"], 0
        for key in dict.fromkeys([*properties, *required]):
            place = f"{path}.properties.{key}"
            schema = properties.get(key, leaf.get("additionalProperties", True))
            kinds = self._kinds(schema)
            if schema is False and key in required:
                raise InexpressibleError(place, "is required and forbidden")
            if schema is False or kinds == {"null"}:
                continue
            tags = [f"n {_literal(f'<{key}>')}", f"n {_literal(f'</{key}>')} nl"]
            part = f"{tags[0]} {self._value(schema, place, may_be_absent=True)} {tags[1]}"
            is_forced = key in required and "null" not in kinds
            num_forced += is_forced
            parts.append(part if is_forced else f"({part})?")
        if some and not num_forced:
            raise InexpressibleError(path, "needs a required property: an empty object would be a string here")
        return " ".join(parts)

    def _items(self, leaf: dict[str, Any], path: str, some: bool) -> str:
        least = max(_checked(leaf, "minItems", int, 0, path), int(some))
        most = _checked(leaf, "maxItems", int, None, path)
        prefix = _checked(leaf, "prefixItems", list, [], path)[:most]
        items = leaf.get("items", True)
        if items is False:
            most = len(prefix)
        if most is not None and most < least:
            raise InexpressibleError(path, f"allows no array: at least {least} and at most {most} items")
        body = ""
        if most is None or most > len(prefix):
            bounds = f"{max(0, least - len(prefix))},{'' if most is None else most - len(prefix)}"
            body = f"({self._item(items, f'{path}.items')}){{{bounds}}}"
        for i in reversed(range(len(prefix))):
            body = f"{self._item(prefix[i], f'{path}.prefixItems.{i}')} {body}"
            if i >= least:
                body = f"({body})?"
        return f"nl {body}"

    def _item(self, schema: Any, path: str) -> str:
        return f'n "<item>" {self._value(schema, path, may_be_absent=False)} n "</item>" nl'

    def _value(self, schema: Any, path: str, *, may_be_absent: bool) -> str:
        """What stands between the tags of a member or an item; an absent one is null where that is allowed."""
        kinds = self._kinds(schema)
        if not kinds or "string" in kinds:
            return f"({' | '.join(self._texts(schema, path))})"
        present = kinds - {"null"} if may_be_absent else kinds
        if present in ({"object"}, {"array"}):
            container = self._plain_container(schema, path)
            if container is not None:
                return container
        return self._json(schema, path)

    def _plain_container(self, schema: Any, path: str) -> str | None:
        """The rule of the only container that a schema allows; None where tags cannot say what the schema does."""
        try:
            leaves = [leaf for leaf in self._leaves(schema, path) if self._kinds(leaf[0]) != {"null"}]
            if len(leaves) == 1 and self._tag_fault(*leaves[0]) is None:
                return self._container(*leaves[0])
        except InexpressibleError:
            return None
        return None

    def _texts(self, schema: Any, path: str) -> list[str]:
        """The alternatives of a value that may be a string."""
        texts, found, scalars = [], [], []
        for leaf, place in self._leaves(schema, path):
            kinds = self._kinds(leaf)
            if not kinds or "string" in kinds:
                texts.append(self._text(leaf, place))
                kinds -= {"string"}
            if kinds & {"object", "array"}:
                found.append((leaf, place))
            if kinds & {"integer", "number", "boolean"}:
                scalars.append(place)
        if scalars and PLAIN not in texts:
            raise InexpressibleError(scalars[0], "cannot be told from the texts that may stand here too")
        if len(found) > 1 or any({"object", "array"} <= self._kinds(leaf) for leaf, _ in found):
            raise InexpressibleError(found[-1][1], "is one of several things with tags inside, beside a string")
        for leaf, place in found:
            fault = self._tag_fault(leaf, place)
            if fault is not None:
                raise fault
            texts.append(self._container(leaf, place, some=True))
        return list(dict.fromkeys(texts))

    def _text(self, leaf: dict[str, Any], path: str) -> str:
        """The terminal of a string."""
        words = _unsupported(_NEVER, leaf)
        if words:
            raise InexpressibleError(f"{path}.{words[0]}", "is not supported here")
        least = _checked(leaf, "minLength", int, 0, path)
        most = _checked(leaf, "maxLength", int, None, path)
        values, parts = _values(leaf), []
        if values is not None:
            if not all(value is None or isinstance(value, str) for value in values):
                raise InexpressibleError(path, "mixes texts and other values, which cannot be told apart")
            texts = [text for text in values if text is not None and NAMESPACE not in text]
            texts = [text for text in texts if least <= len(text) and (most is None or len(text) <= most)]
            parts.append(f"({' | '.join(map(_literal, texts))})")
            if not texts:
                raise InexpressibleError(path, "allows no text")
        elif most is not None and most < least:
            raise InexpressibleError(path, f"allows no text: at least {least} and at most {most} characters")
        elif least or most is not None:
            parts.append(f"/(?s:.{{{least},{'' if most is None else most}}})/")
        pattern = _checked(leaf, "pattern", str, None, path)
        if pattern is not None:
            parts.append(f"/{_regex(pattern, f'{path}.pattern')}/")
        return self._rules.named(" & ".join([PLAIN, *parts]), "T") if parts else PLAIN

    def _json(self, schema: dict[str, Any], path: str) -> str:
        """The rule of a value as JSON text."""
        return self._rules.json(json.dumps(self._standalone(schema) | {"x-guidance": _JSON_STYLE}), path)

    def _standalone(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A part of the schema with all that it refers to."""
        names: dict[str, str] = {}

        def rewritten(value: Any) -> Any:
            if isinstance(value, list):
                return [rewritten(item) for item in value]
            if not isinstance(value, dict):
                return value
            own = {key: rewritten(item) for key, item in value.items()}
            if isinstance(own.get("$ref"), str):
                own["$ref"] = f"#/$defs/{names.setdefault(own['$ref'], str(len(names)))}"
            return own

        document, definitions = dict(rewritten(schema)), list[Any]()
        while len(definitions) < len(names):
            definitions.append(rewritten(referred(list(names)[len(definitions)], self._root)))
        if definitions:
            document["$defs"] = {str(i): definition for i, definition in enumerate(definitions)}
        return document


def _unsupported(words: frozenset[str], schema: Mapping[str, Any]) -> list[str]:
    """Those of the keywords that the schema has, in a fixed order."""
    return sorted(word for word in words & set(schema) if word not in _HARMLESS_IF_FALSE or schema[word] is not False)


def _checked(schema: Mapping[str, Any], word: str, kind: type[Any], default: Any, path: str) -> Any:
    """A keyword's value, of its type."""
    value = schema.get(word, default)
    if word in schema and (not isinstance(value, kind) or isinstance(value, bool) or (kind is int and value < 0)):
        expected = {int: "an integer >= 0", str: "a string", list: "an array", dict: "an object"}[kind]
        raise InexpressibleError(f"{path}.{word}", f"must be {expected}")
    return value


def _required(schema: Mapping[str, Any], path: str) -> list[str]:
    required: list[str] = _checked(schema, "required", list, [], path)
    if not all(isinstance(key, str) for key in required):
        raise InexpressibleError(f"{path}.required", "must be an array of strings")
    return required


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists, None where it lists none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _literal(text: str) -> str:
    """A text as a string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _regex(pattern: str, path: str) -> str:
    """The texts in which a pattern is found, as a regular expression between slashes.

    Anchors are understood at the pattern's ends, and hold for all of it: with alternatives, that allows fewer texts.
    """
    inner, starts, ends = pattern, pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$\Z", pattern) is not None
    inner = inner[1 if starts else 0 : -1 if ends else None]
    inner = re.sub(r"\\.|/", lambda found: _REWRITTEN.get(found[0], found[0]), inner, flags=re.DOTALL)
    fault = fault_of("regex", inner)
    if fault is not None:
        raise InexpressibleError(path, f"cannot be followed: {fault}")
    inner = inner.replace("\n", r"\n").replace("\r", r"\r")
    return f"{'' if starts else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"


def fault_of(kind: Literal["grammar", "json_schema", "regex"], source: str) -> str | None:
    """Why a grammar cannot be followed, in one line; None where it can."""
    import llguidance  # only requests that need it pay for the import

    fault = llguidance.LLMatcher.validate_grammar(llguidance.grammar_from(kind, source))
    return " ".join(fault.split())[:_MAX_FAULT_CHARS] or None
