"""Grammars: the masks of a round are those of its tokens one by one, and text sampled under them is in the grammar."""

import json
import re
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest

from tandem import demo
from tandem.engine.errors import GrammarError, InvalidParameterError
from tandem.engine.grammar import Grammar, GrammarCompiler, GrammarMatcher, unpack_masks
from tandem.engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_pretrained(demo.path())
VOCAB_SIZE = 2061  # not a multiple of 32, and wider than the tokenizer
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
GBNF = 'root ::= "yes" | "no" (" " [a-c]+)?'
GRAMMARS = [
    Grammar("json_object"),
    Grammar.json_schema(SCHEMA),
    Grammar("regex", r"[a-f]{2,5}-[0-9]+!"),
    Grammar("grammar", GBNF),
    Grammar("grammar", 'start: "a" start "b" | "!"'),
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB_SIZE, TOKENIZER.end_ids)


def masks_of(matcher: GrammarMatcher, drafts: list[int]) -> npt.NDArray[np.bool_]:
    return unpack_masks(matcher.masks(drafts), VOCAB_SIZE)


def advance_all(matcher: GrammarMatcher, tokens: Iterable[int]) -> None:
    for token in tokens:
        matcher.advance(token)


def fits(matcher: GrammarMatcher, token: int) -> bool:
    try:
        matcher.advance(token)
    except GrammarError:
        return False
    return True


def walk(matcher: GrammarMatcher, rng: np.random.Generator, most: int) -> list[int]:
    """Tokens chosen at random among the allowed ones, up to the end of the text."""
    tokens: list[int] = []
    while len(tokens) < most and not matcher.complete:
        allowed = np.flatnonzero(masks_of(matcher, [])[0])
        # An end is taken as soon as there may be one, or a text of free length would go on for ever.
        ends = [token for token in allowed if token in TOKENIZER.end_ids]
        token = int(ends[0] if ends else rng.choice(allowed))
        if token in TOKENIZER.end_ids:
            break
        matcher.advance(token)
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_masks_of_a_round_are_those_of_its_tokens_one_by_one(
    grammar: Grammar, compiler: GrammarCompiler, rng: np.random.Generator
) -> None:
    for _ in range(10):
        tokens = walk(compiler.matcher(grammar), rng, 12)
        matcher = compiler.matcher(grammar)
        for start in range(len(tokens)):
            drafts = tokens[start : start + int(rng.integers(0, 6))]
            if rng.random() < 0.5 and drafts:
                drafts[int(rng.integers(len(drafts)))] = int(rng.integers(TOKENIZER.vocab_size))
            expected = np.ones((1 + len(drafts), VOCAB_SIZE), dtype=np.bool_)
            alone = compiler.matcher(grammar)
            advance_all(alone, tokens[:start])
            for i, draft in enumerate([*drafts, None]):
                if alone.complete:
                    break
                expected[i] = masks_of(alone, [])[0]
                if draft is None or not fits(alone, draft):
                    break
            np.testing.assert_array_equal(masks_of(matcher, drafts), expected)
            matcher.advance(tokens[start])


def test_a_forbidden_draft_is_masked_where_it_would_be_sampled(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(Grammar("regex", "[0-9]+x"))
    digit, letter = TOKENIZER.encode("7")[0], TOKENIZER.encode("a")[0]
    masks = masks_of(matcher, [digit, letter, digit])
    assert masks[0, digit]
    assert not masks[1, letter]
    assert masks[2:].all()


@pytest.mark.parametrize("kind", ["schema", "object", "regex", "gbnf"])
def test_random_allowed_tokens_spell_a_text_of_the_grammar(
    kind: str, compiler: GrammarCompiler, rng: np.random.Generator
) -> None:
    grammar = dict(zip(["object", "schema", "regex", "gbnf"], GRAMMARS, strict=False))[kind]
    finished = 0
    for _ in range(12):
        matcher = compiler.matcher(grammar)
        text = TOKENIZER.decode(walk(matcher, rng, 400))
        if not matcher.complete and kind in ("schema", "object"):
            continue  # a string or an array that went on for the whole walk
        finished += 1
        if kind == "regex":
            assert re.fullmatch(grammar.source, text)
        elif kind == "gbnf":
            assert re.fullmatch("yes|no( [abc]+)?", text)
        else:
            value = json.loads(text)
            assert isinstance(value, dict)
            if kind == "schema":
                assert set(value) == {"name", "sizes"}
                assert all(isinstance(size, int) for size in value["sizes"])
    assert finished >= 3


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_texts_of_one_grammar_go_their_own_ways(
    grammar: Grammar, compiler: GrammarCompiler, rng: np.random.Generator
) -> None:
    def made_alone() -> GrammarMatcher:
        return GrammarCompiler(TOKENIZER, VOCAB_SIZE, TOKENIZER.end_ids).matcher(grammar)

    pairs = [(compiler.matcher(grammar), made_alone()) for _ in range(3)]
    lengths = [0, 0, 0]
    for _ in range(60):
        i = int(rng.integers(3))
        allowed = np.flatnonzero(masks_of(pairs[i][1], [])[0])
        if lengths[i] and (rng.random() < 0.2 or pairs[i][1].complete):
            lengths[i] -= 1
            for matcher in pairs[i]:
                matcher.rollback(1)
        else:
            lengths[i] += 1
            token = int(rng.choice(allowed))
            for matcher in pairs[i]:
                matcher.advance(token)
        for shared, alone in pairs:
            np.testing.assert_array_equal(masks_of(shared, []), masks_of(alone, []))
    np.testing.assert_array_equal(masks_of(compiler.matcher(grammar), []), masks_of(made_alone(), []))


@pytest.mark.parametrize("starts_after", [None, "</mm:think>"])
def test_what_is_rolled_back_was_never_there(
    starts_after: str | None, compiler: GrammarCompiler, rng: np.random.Generator
) -> None:
    trigger = None if starts_after is None else TOKENIZER.token_id(starts_after)
    grammar = Grammar.json_schema(SCHEMA, starts_after=starts_after)
    free = [] if trigger is None else [*TOKENIZER.encode("7 is a thought"), trigger]
    tokens = [*free, *walk(compiler.matcher(Grammar.json_schema(SCHEMA)), rng, 20)]
    for kept in range(len(tokens) + 1):
        matcher = compiler.matcher(grammar)
        advance_all(matcher, tokens)
        matcher.rollback(len(tokens) - kept)
        alone = compiler.matcher(grammar)
        advance_all(alone, tokens[:kept])
        np.testing.assert_array_equal(masks_of(matcher, tokens[kept:][:4]), masks_of(alone, tokens[kept:][:4]))


def test_text_before_the_start_token_is_free(compiler: GrammarCompiler) -> None:
    trigger = TOKENIZER.token_id("</mm:think>")
    assert trigger is not None
    matcher = compiler.matcher(Grammar("regex", "[0-9]", starts_after="</mm:think>"))
    digit, letter = TOKENIZER.encode("7")[0], TOKENIZER.encode("a")[0]
    masks = masks_of(matcher, [letter, trigger, digit])
    assert masks[:2].all()
    assert masks[2, digit]
    assert not masks[2, letter]
    advance_all(matcher, (letter, trigger, digit))
    assert matcher.complete


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        (Grammar("regex", "("), "regex"),
        (Grammar("grammar", "root ::= ("), "grammar"),
        (Grammar("json_schema", "[1"), "json_schema"),
        (Grammar("json_schema", '{"type": "nonsense"}'), "nonsense"),
        (Grammar("regex", "((a{1000}){1000}){1000}"), "too many expressions"),
        (Grammar("regex", r"[^\s\S]"), "no text fits"),
        (Grammar("json_schema", '{"$ref": "#"}'), "no text fits"),
        (Grammar("grammar", 'start: "a" start'), "too many items"),
    ],
    ids=["regex", "grammar", "json", "schema", "too large", "empty", "only itself", "without end"],
)
def test_a_malformed_grammar_is_refused_by_name(grammar: Grammar, named: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidParameterError, match=f"(?i){named}") as caught:
        compiler.matcher(grammar)
    assert "\n" not in str(caught.value)


def test_kinds_and_sources_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match="xml"):
        Grammar("xml", "x")  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="source"):
        Grammar("regex")
    with pytest.raises(InvalidParameterError, match="no source"):
        Grammar("json_object", "{}")
