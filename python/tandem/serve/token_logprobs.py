"""Log-probabilities in the two forms that OpenAI's API has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.engine.tokenizer import Tokenizer
from tandem.serve.messages import LogprobEntry


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
    """Of chat completions: each token with its bytes."""
    content = []
    for token_id, logprob, top in entries:
        alternatives = [_chat_entry(tokenizer, other, value) for other, value in top]
        content.append(_chat_entry(tokenizer, token_id, logprob) | {"top_logprobs": alternatives})
    return {"content": content, "refusal": None}


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


class CompletionLogprobs:
    """Of text completions: parallel lists. One object per choice; it counts characters from the answer's start."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.decoder(skip_special_tokens=False)
        self._offset = 0

    def render(self, token_ids: Sequence[int], entries: Sequence[LogprobEntry | None]) -> dict[str, Any]:
        """The lists of some tokens; the first of a prompt has no entry."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._decoder.feed(token_id))
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else entry[1] for entry in entries],
            "top_logprobs": [
                None if entry is None else {self._name(other): value for other, value in entry[2]} for entry in entries
            ],
            "text_offset": offsets,
        }

    def _name(self, token_id: int) -> str:
        """A token's text; where it is no whole character, its bytes, so that unlike tokens have unlike names."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
