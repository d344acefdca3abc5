"""Reasoning and content of a reply, however the text is cut into pieces."""

import random

import pytest

from tandem.engine.chat import ThinkingMode
from tandem.engine.tokenizer import NAMESPACE
from tandem.serve.reasoning import MAX_BLANKS, ContentText, ReasoningParser, ReasoningText, held_back

CALL = f'{NAMESPACE}<tool_call>{NAMESPACE}<invoke name="f">{NAMESPACE}</invoke>{NAMESPACE}</tool_call>'


def split(mode: ThinkingMode, pieces: list[str]) -> tuple[str, str]:
    """(reasoning, content) of a reply that arrives in pieces; reasoning never follows content."""
    parser = ReasoningParser(mode)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    assert all(delta.text for delta in deltas)
    kinds = [type(delta) for delta in deltas]
    assert kinds == sorted(kinds, key=lambda kind: kind is ContentText)
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningText))
    return reasoning, "".join(delta.text for delta in deltas if isinstance(delta, ContentText))


CASES: list[tuple[ThinkingMode, str, str, str]] = [
    ("enabled", "why</mm:think>answer", "why", "answer"),
    ("enabled", "no end of it", "no end of it", ""),
    ("enabled", "", "", ""),
    ("enabled", "</mm:think>\n\nanswer", "", "\n\nanswer"),
    ("enabled", " <mm:think>why</mm:think>answer", "why", "answer"),
    ("enabled", "a<mm:think>b</mm:think>c</mm:think>d", "a<mm:think>b", "c</mm:think>d"),
    ("enabled", "cut</mm:th", "cut</mm:th", ""),
    ("enabled", "<mm:th", "<mm:th", ""),
    ("enabled", "1 < 2 </mm:thinker></mm:think>x", "1 < 2 </mm:thinker>", "x"),
    ("enabled", f"call it{CALL}", "call it", CALL),
    ("enabled", f"call it{NAMESPACE} \n<tool_call>x", "call it", f"{NAMESPACE} \n<tool_call>x"),
    ("enabled", f"a {NAMESPACE} sign{NAMESPACE}</mm:think>{CALL}", f"a {NAMESPACE} sign{NAMESPACE}", CALL),
    ("enabled", f"a{NAMESPACE}<tool_calls>b", f"a{NAMESPACE}<tool_calls>b", ""),
    ("enabled", f"a{NAMESPACE}<tool_ca", f"a{NAMESPACE}<tool_ca", ""),
    ("enabled", f"a</mm:think>b{CALL}", "a", f"b{CALL}"),
    ("disabled", "answer", "", "answer"),
    ("disabled", "</mm:think>answer", "", "answer"),
    ("disabled", "\n</mm:think></mm:think>answer", "", "</mm:think>answer"),
    ("disabled", "an </mm:think> in it", "", "an </mm:think> in it"),
    ("disabled", "<mm:think>why</mm:think>answer", "why", "answer"),
    ("adaptive", "answer", "", "answer"),
    ("adaptive", "\n <mm:think>why</mm:think>answer", "why", "answer"),
    ("adaptive", "</mm:think>answer", "", "answer"),
    ("adaptive", "<mm:think>never closed", "never closed", ""),
    ("adaptive", "say <mm:think> or not", "", "say <mm:think> or not"),
    ("adaptive", "\n\n<mm:th", "", "\n\n<mm:th"),
    ("adaptive", " \n ", "", " \n "),
    ("adaptive", " " * MAX_BLANKS + "<mm:think>why", "why", ""),
    ("adaptive", " " * (MAX_BLANKS + 1) + "<mm:think>x", "", " " * (MAX_BLANKS + 1) + "<mm:think>x"),
    ("adaptive", CALL, "", CALL),
]


@pytest.mark.parametrize(("mode", "text", "reasoning", "content"), CASES)
def test_a_reply_splits_the_same_at_every_point(mode: ThinkingMode, text: str, reasoning: str, content: str) -> None:
    for cut in range(len(text) + 1):
        assert split(mode, [text[:cut], text[cut:]]) == (reasoning, content)
    assert split(mode, list(text)) == (reasoning, content)


@pytest.mark.parametrize("mode", ["enabled", "disabled", "adaptive"])
def test_random_mixtures_of_tags_split_the_same_in_any_pieces(mode: ThinkingMode, py_rng: random.Random) -> None:
    atoms = ["<mm:think>", "</mm:think>", NAMESPACE, "<tool_call>", "<", "]", " ", "\n", "a", "é", "</mm:", "]<]mini"]
    for _ in range(400):
        text = "".join(py_rng.choices(atoms, k=py_rng.randint(0, 10)))
        whole = split(mode, [text])
        cuts = sorted(py_rng.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert split(mode, pieces) == whole
        assert split(mode, list(text)) == whole


def test_text_is_shown_as_soon_as_nothing_can_change_it() -> None:
    parser = ReasoningParser("enabled")
    assert parser.feed("one </m") == [ReasoningText("one ")]
    assert parser.feed("m:think") == []
    assert parser.feed("s> two") == [ReasoningText("</mm:thinks> two")]
    assert parser.feed("</mm:think>three") == [ContentText("three")]
    assert parser.feed("</mm:think>") == [ContentText("</mm:think>")]


@pytest.mark.parametrize("unit", ["<", "</mm:think", NAMESPACE, " ", NAMESPACE + " " * MAX_BLANKS, "a"])
def test_what_is_held_back_stays_short_whatever_arrives(unit: str) -> None:
    # Every character is looked at again only while it is held back, so a bound on that makes the work linear.
    for mode in ("enabled", "disabled", "adaptive"):
        parser = ReasoningParser(mode)
        shown = 0
        for count, char in enumerate(unit * 50, start=1):
            shown += sum(len(delta.text) for delta in parser.feed(char))
            assert count - shown <= MAX_BLANKS + len(NAMESPACE) + len("<tool_call>")


def test_the_longest_beginning_of_a_marker_is_held_back() -> None:
    assert held_back("xaba", ("abab",)) == 3
    assert held_back("abab", ("abab",)) == 2
    assert held_back("x", ("abab", "xy")) == 1
    assert held_back("", ("abab",)) == 0
