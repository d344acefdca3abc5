"""What a caller can get wrong, as types. Each message names what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence


class InvalidParameterError(ValueError):
    """A parameter has a value that is not allowed.

    ``field`` is the parameter's name, ``value`` what was given, ``allowed`` the rule in words.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}={value!r} is not allowed: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class InvalidPromptError(ValueError):
    """A prompt cannot be run: it is empty, too long, or holds ids outside the vocabulary."""


class InvalidTokenIdError(InvalidPromptError):
    """A token id lies outside the vocabulary. ``field`` says where it was found."""

    def __init__(self, field: str, token_id: int, vocab_size: int) -> None:
        super().__init__(f"{field} holds token id {token_id}; allowed are 0 to {vocab_size - 1}")
        self.field = field
        self.token_id = token_id
        self.vocab_size = vocab_size


class PoolTooSmallError(ValueError):
    """The page pool cannot hold one sequence of the configured length."""

    def __init__(self, given_bytes: int, needed_bytes: int, max_model_len: int) -> None:
        super().__init__(
            f"the KV pool of {given_bytes:,} bytes is too small for one sequence: {max_model_len} tokens need "
            f"{needed_bytes:,} bytes; give a larger kv_cache_bytes or a smaller max_model_len"
        )
        self.given_bytes = given_bytes
        self.needed_bytes = needed_bytes
        self.max_model_len = max_model_len


class TokenizerError(ValueError):
    """The tokenizer's files are missing or malformed, or of a kind whose token bytes cannot be told exactly."""


class InvalidChatError(ValueError):
    """A conversation does not fit the chat template."""


class GrammarError(RuntimeError):
    """A text cannot go on in its grammar."""


class EngineClosedError(RuntimeError):
    """The engine was closed; it takes no more requests."""


class RequestFailedError(RuntimeError):
    """A request ended because its step failed; the message is the step's own error."""

    def __init__(self, request_id: int, message: str) -> None:
        super().__init__(f"request {request_id} failed: {message}")
        self.request_id = request_id
        self.message = message


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise `InvalidTokenIdError` for the first id outside ``[0, vocab_size)``."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidTokenIdError(field, token_id, vocab_size)
