"""Text that follows a grammar: which ids may come at each position of a round.

The matching is llguidance's: it walks the grammar byte by byte and needs no tables made beforehand. A row with a
grammar is *synchronous*: its masks need the host to know all tokens before them, so it is planned only while it has no
step in flight. A round has one mask for the token after each of its drafts; a draft that the grammar forbids is masked
where it would have to be sampled, so verification rejects it, and the positions after it are dead.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from tandem.engine.errors import InvalidParameterError

if TYPE_CHECKING:
    import llguidance

MaskArray = npt.NDArray[np.int32]

GrammarKind = Literal["json_object", "json_schema", "regex", "grammar"]
_BITS = 32
_EVERYTHING = -1


@dataclass(frozen=True)
class Grammar:
    """What a request's text must follow.

    Attributes:
        kind: ``json_object`` (any object), ``json_schema``, ``regex``, or ``grammar`` (Lark, or GBNF as llama.cpp's).
        source: the schema as JSON text, the regular expression or the grammar; empty for ``json_object``.
        starts_after: a token by its string, e.g. ``</mm:think>``: the text up to it is free and not part of what must
            follow the grammar. None binds the text from its first token.
    """

    kind: GrammarKind
    source: str = ""
    starts_after: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise InvalidParameterError("grammar", self.kind, f"one of {', '.join(get_args(GrammarKind))}")
        if bool(self.source) == (self.kind == "json_object"):
            allowed = "no source" if self.kind == "json_object" else f"a source for {self.kind}"
            raise InvalidParameterError("grammar", self.source, allowed)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any], *, starts_after: str | None = None) -> Grammar:
        """The JSON texts that a schema allows."""
        return cls("json_schema", json.dumps(schema), starts_after)


class GrammarCompiler:
    """Makes matchers for one vocabulary. Any thread may call it.

    Args:
        tokenizer_json: the content of ``tokenizer.json``.
        vocab_size: V, the width of the logits, at least the tokenizer's own.
        end_ids: ids that end a text whose grammar is complete.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, end_ids: Collection[int]) -> None:
        import llguidance  # only requests with a grammar pay for the import

        self._library = llguidance
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(end_ids))

    def matcher(self, grammar: Grammar, starts_after: int | None) -> GrammarMatcher:
        """A matcher at the start of its text; ``starts_after`` is the id of the grammar's own `starts_after`.

        Raises:
            InvalidParameterError: the grammar is malformed, or too large to be walked.
        """
        try:
            source = self._source(grammar)
        # A GBNF text is translated by code that raises whatever it meets, and a schema must be a JSON object.
        except Exception as error:
            raise InvalidParameterError("grammar", grammar.source, f"a valid {grammar.kind} ({error})") from error
        matcher = self._library.LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())
            raise InvalidParameterError("grammar", grammar.source, f"a valid {grammar.kind} ({reason})")
        return GrammarMatcher(matcher, starts_after)

    def _source(self, grammar: Grammar) -> str:
        match grammar.kind:
            case "json_object":
                return self._library.grammar_from("json_schema", '{"type": "object"}')
            case "grammar":
                return self._library.grammar_from("grammar", grammar.source)
            case kind:
                return self._library.grammar_from(kind, grammar.source)


class GrammarMatcher:
    """Where one request's text stands in its grammar. The tokens it has seen are those of the text so far."""

    def __init__(self, matcher: llguidance.LLMatcher, starts_after: int | None) -> None:
        self._matcher = matcher
        self._starts_after = starts_after
        self._started = starts_after is None
        self._history: list[bool] = []

    @property
    def complete(self) -> bool:
        """Whether nothing but an end may follow."""
        return self._started and self._matcher.is_stopped()

    def advance(self, token: int) -> bool:
        """Take the text's next token; False, and nothing happens, if the grammar forbids it."""
        if self._started and self._matcher.try_consume_tokens([token]) == 0:
            return False
        self._history.append(self._started)
        self._started = self._started or token == self._starts_after
        return True

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` tokens."""
        if count == 0:
            return
        undone = self._history[-count:]
        del self._history[-count:]
        if any(undone):
            self._matcher.rollback(sum(undone))
        self._started = undone[0]

    def fill_masks(self, drafts: Sequence[int], masks: MaskArray) -> None:
        """The ids allowed at each position of a round, one bit each, lowest first.

        Args:
            drafts: the round's n drafts, as they will be fed.
            masks: int32 ``[1 + n, ceil(V / 32)]``, C-contiguous; row i is for the token after i drafts. Rows after a
                forbidden draft, or after the end, allow everything.
        """
        masks.fill(_EVERYTHING)
        taken = 0
        for row, draft in zip(masks, [*drafts, None], strict=True):
            if self.complete:
                break
            if self._started:
                self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if draft is None or not self.advance(draft):
                break
            taken += 1
        self.rollback(taken)


def mask_words(vocab_size: int) -> int:
    """int32 words of one mask over ``vocab_size`` ids."""
    return -(-vocab_size // _BITS)


def unpack_masks(masks: MaskArray, vocab_size: int) -> npt.NDArray[np.bool_]:
    """bool ``[P, V]`` of masks int32 ``[P, ceil(V / 32)]``."""
    return np.unpackbits(masks.view(np.uint8), axis=1, count=vocab_size, bitorder="little").astype(np.bool_)
