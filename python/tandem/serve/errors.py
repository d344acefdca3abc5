"""What goes wrong between a client and the server, and what keeps a server from starting."""

from __future__ import annotations

from typing import Any

_MAX_TEXT = 1000


class ApiError(Exception):
    """A request that is answered with an error; the body has the form that OpenAI's clients read.

    Args:
        status: HTTP status.
        message: names what was given and what is allowed; cut in the middle where what was given is long.
        param: the field at fault.
        code: a word for programs.
        retry_after_s: value of the Retry-After header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _cut(message)
        self.param = None if param is None else _cut(param)
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """OpenAI's name for this class of errors."""
        match self.status:
            case 401:
                return "authentication_error"
            case 404:
                return "not_found_error"
            case 429:
                return "rate_limit_error"
            case status if status < 500:
                return "invalid_request_error"
        return "server_error"

    def body(self) -> dict[str, Any]:
        """The error object."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Headers that belong to the answer."""
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def _cut(text: str) -> str:
    """Without its middle where it is too long: an answer repeats no more than a little of a request."""
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT // 2]} ... {text[-_MAX_TEXT // 4 :]}"


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


class MissingPackagesError(ValueError):
    """The packages of the ``serve`` extra are not installed."""


class ServerSetupError(ValueError):
    """The server cannot start: the address cannot be used, or a file cannot be read."""


class EngineStartError(ValueError):
    """The engine process refused to start; the message is its own."""
