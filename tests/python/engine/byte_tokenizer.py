"""A byte-level tokenizer made on the spot: one token per byte, a few merges, and special tokens."""

import json
from collections.abc import Sequence

from tandem.engine.tokenizer import Tokenizer, _byte_alphabet

SPECIALS = ("[pad]", "]~!b[", "]~b]", "[e~[", "<mm:think>", "</mm:think>")


def byte_tokenizer(merges: Sequence[tuple[str, str]] = (), extra_tokens: Sequence[str] = ()) -> Tokenizer:
    """The tokenizer of `byte_tokenizer_json`."""
    return Tokenizer(byte_tokenizer_json(merges, extra_tokens))


def byte_tokenizer_json(merges: Sequence[tuple[str, str]] = (), extra_tokens: Sequence[str] = ()) -> str:
    """A tokenizer.json. Ids: `SPECIALS`, the 256 bytes in order, merged pieces, ``extra_tokens`` (special as well)."""
    characters = {byte: char for char, byte in _byte_alphabet().items()}
    pieces = [*SPECIALS, *(characters[byte] for byte in range(256))]
    pieces += [left + right for left, right in merges]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    added = list(enumerate(SPECIALS)) + [(len(pieces) + i, token) for i, token in enumerate(extra_tokens)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    description = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": token, **flags} for i, token in added],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [list(pair) for pair in merges]},
    }
    return json.dumps(description)


def byte_id(byte: int) -> int:
    return len(SPECIALS) + byte


def byte_ids(data: bytes) -> list[int]:
    return [byte_id(byte) for byte in data]
