"""What a tool's JSON schema says of one argument, as far as M3's tags need it: the types that text is restored to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
# Longer ones are refused as numbers: readers of JSON limit the digits that they convert, Python's to 4,300.
_MAX_NUMBER_CHARS = 4000
MAX_ALTERNATIVES = 256
"""Schemas that may hold at one place; further ones are not looked at."""
_CONTAINERS = frozenset({"array", "object"})
_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}


class ArgumentType:
    """One place of a schema. Branches of ``anyOf``, ``oneOf`` and ``allOf`` and local references are all alternatives.

    Args:
        schemas: the schemas that may hold there; what is not an object says nothing.
        root: the whole schema, to which references are relative.
    """

    def __init__(self, schemas: list[Any], root: Any) -> None:
        self._root = root
        self._alternatives = list(self._expand(schemas))

    @cached_property
    def kinds(self) -> frozenset[str]:
        """JSON's names of the types allowed; empty where the schema does not say."""
        return frozenset(kind for schema in self._alternatives for kind in _kinds_of(schema))

    @property
    def may_be_string(self) -> bool:
        """Whether plain text is a string here: the schema says so, or says nothing."""
        return not self.kinds or "string" in self.kinds

    @property
    def may_be_container(self) -> bool:
        """Whether tags inside the value are its members."""
        return not self.kinds or bool(self.kinds & _CONTAINERS)

    def container_for(self, first_tag: str) -> str:
        """``array`` or ``object``, by the schema, else by the first tag inside: arrays repeat ``item``."""
        allowed = self.kinds & _CONTAINERS
        if len(allowed) == 1:
            return next(iter(allowed))
        return "array" if first_tag == "item" else "object"

    def member(self, key: str) -> ArgumentType:
        """The type of an object's property."""
        found = []
        for schema in self._alternatives:
            properties = schema.get("properties")
            if isinstance(properties, dict) and key in properties:
                found.append(properties[key])
            else:
                found.append(schema.get("additionalProperties"))
        return ArgumentType(found, self._root)

    @property
    def required_nulls(self) -> list[str]:
        """An object's properties that are required and may be null; none where several objects are allowed."""
        lists = [words for schema in self._alternatives if isinstance(words := schema.get("required"), list)]
        keys = lists[0] if len(lists) == 1 else []
        return [key for key in keys if isinstance(key, str) and "null" in self.member(key).kinds]

    def item(self, index: int) -> ArgumentType:
        """The type of an array's element."""
        found = []
        for schema in self._alternatives:
            prefix = schema.get("prefixItems")
            if isinstance(prefix, list) and index < len(prefix):
                found.append(prefix[index])
            else:
                found.append(schema.get("items"))
        return ArgumentType(found, self._root)

    def to_json(self, text: str) -> str:
        """JSON of a value without tags: of an allowed type if the text reads as one, else the text as a string.

        Where a string is allowed it is a string, ``null`` included. An empty container's text is not for here.
        """
        value = text.strip()
        if self.may_be_string:
            return json.dumps(text, ensure_ascii=False)
        if value == "null":
            return value
        if "boolean" in self.kinds and value.lower() in ("true", "false"):
            return value.lower()
        if self.kinds & {"integer", "number"} and len(value) <= _MAX_NUMBER_CHARS and _NUMBER.fullmatch(value):
            return value
        if _kind_of_json(value) in self.kinds & _CONTAINERS:
            return value
        return json.dumps(text, ensure_ascii=False)

    def _expand(self, schemas: list[Any]) -> Iterator[dict[str, Any]]:
        """The schemas and all that they refer to, each once."""
        waiting, seen = [schema for schema in reversed(schemas) if isinstance(schema, dict)], set[int]()
        while waiting and len(seen) < MAX_ALTERNATIVES:
            schema = waiting.pop()
            if id(schema) in seen:
                continue
            seen.add(id(schema))
            yield schema
            branches: list[Any] = [referred(schema.get("$ref"), self._root)]
            for word in ("anyOf", "oneOf", "allOf"):
                several = schema.get(word)
                branches += several[:MAX_ALTERNATIVES] if isinstance(several, list) else []
            waiting += [branch for branch in reversed(branches) if isinstance(branch, dict)]


def referred(reference: Any, root: Any) -> Any:
    """The schema at ``#/a/b`` of the root (RFC 6901); None for anything else."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place = root
    for step in reference[1:].split("/")[1:]:
        if not isinstance(place, dict):
            return None
        place = place.get(step.replace("~1", "/").replace("~0", "~"))
    return place


def _kinds_of(schema: dict[str, Any]) -> Iterator[str]:
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from (kind for kind in declared if isinstance(kind, str))
    elif isinstance(schema.get("enum"), list):
        yield from (_KINDS[type(value)] for value in schema["enum"])
    elif "const" in schema:
        yield _KINDS[type(schema["const"])]
    elif "properties" in schema:
        yield "object"
    elif "items" in schema or "prefixItems" in schema:
        yield "array"


def _kind_of_json(text: str) -> str | None:
    """The kind of a JSON text; None for what is not one, or not one that a usual reader would take."""
    try:
        return _KINDS[type(json.loads(text, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
