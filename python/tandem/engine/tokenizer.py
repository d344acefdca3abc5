"""The checkpoint's tokenizer: text to ids, and ids to bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tandem.engine.detokenize import TextDecoder
from tandem.engine.errors import TokenizerError

END_OF_TURN = "[e~["
THINK_OPEN = "<mm:think>"
THINK_CLOSE = "</mm:think>"
NAMESPACE = "]<]minimax[>["
"""Stands before every tag of a tool call."""


def _byte_alphabet() -> dict[str, int]:
    """The 256 characters by which byte-level BPE writes bytes (Radford et al., GPT-2): character -> byte.

    Printable Latin-1 characters stand for themselves; the other bytes take the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


class Tokenizer:
    """A byte-level BPE tokenizer read from ``tokenizer.json``.

    Args:
        data: the content of ``tokenizer.json``.
        eos_token: the string of the token that ends a turn, if the checkpoint's configuration names one.

    Raises:
        TokenizerError: the description is malformed, or its decoder is not byte-level, so that token bytes cannot be
            told one by one.
    """

    def __init__(self, data: str, eos_token: str | None = None) -> None:
        import tokenizers

        description = _parse_object(data, "tokenizer.json")
        _require_byte_level(description.get("decoder"))
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(data)
        # The library raises nothing more specific for a description that it cannot read.
        except Exception as error:
            raise TokenizerError(f"tokenizer.json cannot be read: {error}") from error
        self._alphabet = _byte_alphabet()
        self._bytes: dict[int, bytes] = {}
        added = description.get("added_tokens", [])
        self.special_ids = frozenset(int(token["id"]) for token in added if token.get("special"))
        self._eos_token = eos_token

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` and, where present, ``tokenizer_config.json`` of a model directory.

        Raises:
            TokenizerError: there is no ``tokenizer.json``, or one of the files is malformed.
        """
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{directory} has no tokenizer.json")
        config = read_json(Path(directory) / "tokenizer_config.json")
        eos = config.get("eos_token")
        return cls(path.read_text(encoding="utf-8"), eos["content"] if isinstance(eos, dict) else eos)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        """The content of a ``tokenizer.json``."""
        text: str = self._tokenizer.to_str()
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a token by its string, None if the vocabulary has no such token."""
        return self._tokenizer.token_to_id(token)

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a reply: the configuration's end token and M3's end of turn, where the vocabulary has them."""
        ids = (self.token_id(token) for token in (self._eos_token, END_OF_TURN) if token is not None)
        return frozenset(i for i in ids if i is not None)

    @cached_property
    def hidden_ids(self) -> frozenset[int]:
        """Ids left out of the text when special tokens are skipped: all special ones but those of a reply's tags.

        The tags tell a reply's reasoning, answer and tool calls from each other, so they are text whatever flag the
        vocabulary gives them.
        """
        tags = {self.token_id(tag) for tag in (THINK_OPEN, THINK_CLOSE, NAMESPACE)}
        return frozenset(i for i in self.special_ids if i not in tags)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; special tokens written out in it become their ids, and nothing is added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id that the vocabulary does not use."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self._tokenizer.id_to_token(token_id)
            data = b"" if token is None else self._bytes_of(token)
            self._bytes[token_id] = data
        return data

    def visible_bytes(self, token_id: int) -> bytes:
        """As `token_bytes`, but empty for `hidden_ids`."""
        return b"" if token_id in self.hidden_ids else self.token_bytes(token_id)

    def _bytes_of(self, token: str) -> bytes:
        try:
            return bytes(self._alphabet[char] for char in token)
        except KeyError:
            # Added tokens may hold characters outside the byte alphabet; such a token is its own text.
            return token.encode("utf-8")

    def decoder(self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> TextDecoder:
        """A decoder for the tokens that follow ``prompt_ids``."""
        token_bytes = self.visible_bytes if skip_special_tokens else self.token_bytes
        tail = b""
        for token_id in reversed(prompt_ids):
            if len(tail) >= 3 or token_id in self.special_ids:
                break
            tail = token_bytes(token_id) + tail
        return TextDecoder(token_bytes, tail)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``; a character left incomplete at the end is not part of it."""
        decoder = self.decoder(skip_special_tokens=skip_special_tokens)
        return "".join(decoder.feed(token_id) for token_id in token_ids)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no such file. Raises `TokenizerError` that names the file."""
    return _parse_object(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else {}


def _parse_object(text: str, source: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{source} holds a JSON {type(content).__name__}, not an object")
    return content


def _require_byte_level(decoder: Any) -> None:
    stages = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [stage.get("type") for stage in stages]
    if "ByteLevel" not in kinds or any(kind not in ("ByteLevel", "Fuse") for kind in kinds):
        raise TokenizerError(f"the tokenizer's decoder is {kinds or 'absent'}; supported is ByteLevel")
