"""Text from tokens: whole characters, nothing of the prompt, and stop strings across token edges."""

import codecs
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.detokenize import StopMatch, StopScanner, incomplete_suffix
from tandem.engine.errors import TokenizerError
from tandem.engine.tokenizer import Tokenizer
from tests.python.engine.byte_tokenizer import byte_ids, byte_tokenizer

TOKENIZER = byte_tokenizer(
    merges=[("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ã", "©")], extra_tokens=["<end of text>", "]<]minimax[>["]
)


def decode_in_one(data: bytes) -> str:
    """The text of the bytes at once, without a character that their end cuts off."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


@settings(max_examples=300, derandomize=True)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30))
def test_any_tokens_one_by_one_give_the_text_of_all_at_once(token_ids: list[int]) -> None:
    for skip in (True, False):
        decoder = TOKENIZER.decoder(skip_special_tokens=skip)
        pieces = [decoder.feed(token_id) for token_id in token_ids]
        token_bytes = TOKENIZER.visible_bytes if skip else TOKENIZER.token_bytes
        assert "".join(pieces) == decode_in_one(b"".join(token_bytes(i) for i in token_ids))


@settings(max_examples=200, derandomize=True)
@given(st.text(max_size=20), st.randoms(use_true_random=False))
def test_any_split_of_a_text_into_tokens_gives_the_text_back(text: str, rng: random.Random) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=False) == text
    data = text.encode()
    cuts = sorted(rng.sample(range(len(data) + 1), min(3, len(data) + 1)))
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    decoder = TOKENIZER.decoder(skip_special_tokens=False)
    pieces = ["".join(decoder.feed(i) for i in byte_ids(part)) for part in parts]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@settings(max_examples=200, derandomize=True)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30))
def test_the_text_equals_that_of_the_tokenizers_library(token_ids: list[int]) -> None:
    text = TOKENIZER.decode(token_ids, skip_special_tokens=False)
    library = TOKENIZER._tokenizer.decode(token_ids, skip_special_tokens=False)
    assert library.rstrip("\ufffd") == text.rstrip("\ufffd")
    assert library.startswith(text)


def test_bytes_of_one_character_wait_for_each_other() -> None:
    decoder = TOKENIZER.decoder()
    assert [decoder.feed(i) for i in byte_ids("é😀".encode())] == ["", "é", "", "", "", "😀"]


def test_a_character_begun_in_the_prompt_is_completed_and_nothing_else_of_the_prompt_is_repeated() -> None:
    emoji = "😀".encode()
    decoder = TOKENIZER.decoder(byte_ids(b"Hi " + emoji[:3]))
    text = "".join(decoder.feed(i) for i in byte_ids(emoji[3:] + b"x"))
    assert text == "😀x"


def test_a_complete_prompt_leaves_nothing_behind() -> None:
    for prompt in ("Hi ", "Hi é", "", "😀"):
        decoder = TOKENIZER.decoder(byte_ids(prompt.encode()))
        assert decoder.feed(byte_ids(b"x")[0]) == "x"


@pytest.mark.parametrize(
    ("data", "suffix"),
    [
        (b"", b""),
        (b"abc", b""),
        (b"ab\xf0\x9f\x98", b"\xf0\x9f\x98"),
        (b"\xe2\x82", b"\xe2\x82"),
        (b"\xe2\x82\xac", b""),
        (b"\x9f\x98\x80", b""),
        (b"\xc0", b""),
        (b"\xc3", b"\xc3"),
    ],
)
def test_incomplete_suffix_is_the_start_of_a_character(data: bytes, suffix: bytes) -> None:
    assert incomplete_suffix(data) == suffix


def test_control_tokens_are_left_out_but_the_tags_of_a_reply_stay() -> None:
    ids = TOKENIZER.encode("<mm:think>a</mm:think>b]<]minimax[>[<tool_call>[e~[")
    assert TOKENIZER.decode(ids) == "<mm:think>a</mm:think>b]<]minimax[>[<tool_call>"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "<mm:think>a</mm:think>b]<]minimax[>[<tool_call>[e~["
    assert TOKENIZER.end_ids == {TOKENIZER.token_id("[e~[")}


def test_a_token_with_characters_outside_the_byte_alphabet_is_its_own_text() -> None:
    end = TOKENIZER.token_id("<end of text>")
    assert end is not None
    assert TOKENIZER.decode([end], skip_special_tokens=False) == "<end of text>"


def test_ids_that_the_vocabulary_does_not_use_have_no_text() -> None:
    assert TOKENIZER.decode([10_000, *byte_ids(b"ok")]) == "ok"


def test_a_tokenizer_whose_token_bytes_cannot_be_told_is_refused() -> None:
    with pytest.raises(TokenizerError, match="Metaspace"):
        Tokenizer('{"decoder": {"type": "Metaspace"}, "model": {}}')


def run_scanner(stops: list[str], pieces: list[str]) -> tuple[str, str, StopMatch | None]:
    """What is shown while streaming, what remains at the end, and the match."""
    scanner, shown = StopScanner(stops), 0
    streamed = ""
    for piece in pieces:
        match = scanner.feed(piece)
        if match is not None:
            assert match.cut >= shown, "text that was already shown would have to be taken back"
            return streamed, scanner.text[shown : match.cut], match
        streamed += scanner.text[shown : scanner.safe_length()]
        shown = scanner.safe_length()
    return streamed, scanner.text[shown:], None


def test_a_stop_string_across_tokens_is_found_and_never_shown() -> None:
    pieces = ["ABC", "DEF", "G", "HI", "J"]
    for stop in ("DEFGHIJ", "DE"):
        streamed, rest, match = run_scanner([stop], pieces)
        assert streamed + rest == "ABC"
        assert match == StopMatch(stop, 3)


def test_text_held_back_for_a_stop_string_is_delivered_at_the_end() -> None:
    streamed, rest, match = run_scanner(["DEFX"], ["ABC", "DEF"])
    assert (streamed, rest, match) == ("ABC", "DEF", None)


def test_of_stop_strings_completed_together_the_first_in_the_text_wins() -> None:
    _, _, match = run_scanner(["d", "bc"], ["abcd"])
    assert match == StopMatch("bc", 1)


@settings(max_examples=400, derandomize=True)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=4), max_size=12),
)
def test_scanning_finds_the_first_stop_that_completes_whatever_the_pieces(stops: list[str], pieces: list[str]) -> None:
    streamed, rest, match = run_scanner(stops, pieces)
    total = ""
    expected = None
    for piece in pieces:
        total += piece
        found = [(total.find(stop), i) for i, stop in enumerate(stops) if stop in total]
        if found:
            start, which = min(found)
            expected = StopMatch(stops[which], start)
            break
    assert match == expected
    assert streamed + rest == (total if expected is None else total[: expected.cut])


def test_a_stop_string_that_ends_too_early_is_not_found_later() -> None:
    scanner = StopScanner(["ab"])
    assert scanner.feed("ab", may_stop=False) is None
    assert scanner.feed("c") is None
    assert scanner.feed("ab") == StopMatch("ab", 3)
