"""From token ids to text, token by token: whole characters only, and stop strings found wherever tokens split them."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Bytes that wait for the rest of their character, and the codec's flags.
DecoderState = tuple[bytes, int]


class TextDecoder:
    """Turns tokens into text as they arrive.

    Text is decoded from the tokens' bytes. Bytes of a character that is not complete yet wait for the next token, so
    the text never holds half a character; bytes that can no longer become one give U+FFFD; a character that the end of
    the request leaves incomplete is left out. Joined over any split of the same tokens the text is the same.

    Where the prompt ends inside a character, that character belongs to the text: its first bytes are taken from the
    prompt, and nothing else of the prompt is ever repeated.

    Args:
        token_bytes: the bytes of one token (empty for tokens that are not text).
        prompt_tail: the bytes of the prompt's last tokens, at least 3 where there are so many.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], prompt_tail: bytes = b"") -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(incomplete_suffix(prompt_tail))

    def feed(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        return self._decoder.decode(self._token_bytes(token_id))

    def save(self) -> DecoderState:
        """The state between two tokens, for `restore`."""
        return self._decoder.getstate()

    def restore(self, state: DecoderState) -> None:
        """Forget what was fed since ``state`` was saved."""
        self._decoder.setstate(state)


def incomplete_suffix(data: bytes) -> bytes:
    """The bytes at the end of ``data`` that begin a UTF-8 character without completing it; empty if there are none."""
    for length in range(1, min(3, len(data)) + 1):
        lead = data[-length]
        if lead & 0xC0 == 0x80:
            continue
        suffix = data[-length:]
        decoder = codecs.getincrementaldecoder("utf-8")("strict")
        try:
            return suffix if decoder.decode(suffix) == "" else b""
        except UnicodeDecodeError:
            return b""
    return b""


@dataclass(frozen=True)
class StopMatch:
    """A stop string in the text: which one, and where the text is cut (characters from the start)."""

    stop: str
    cut: int


class StopScanner:
    """Looks for stop strings in growing text and says how much of it may be shown.

    Among the strings that a token completes, the one that begins first wins; of those beginning at one place, the first
    given. Text that might still become a stop string is held back: the longest end of the text that is a proper prefix
    of one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self.text = ""

    def feed(self, piece: str, *, may_stop: bool = True) -> StopMatch | None:
        """Append ``piece``; the stop string that it completes, if any.

        With ``may_stop`` False nothing ends in this piece, and strings ending in it are not looked for later either.
        """
        seen = len(self.text)
        self.text += piece
        if not self._stops or not may_stop:
            return None
        best: StopMatch | None = None
        for stop in self._stops:
            # A match must end inside the new piece, so it begins no earlier than this.
            start = self.text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0 and (best is None or start < best.cut):
                best = StopMatch(stop, start)
        return best

    def safe_length(self) -> int:
        """How many characters of the text no later token can turn into part of a stop string."""
        length = len(self.text)
        for held in range(min(self._longest - 1, length), 0, -1):
            tail = self.text[length - held :]
            if any(len(stop) > held and stop.startswith(tail) for stop in self._stops):
                return length - held
        return length
