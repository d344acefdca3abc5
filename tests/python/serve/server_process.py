"""A server as a process of its own, on a free port of the loopback interface."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from openai import OpenAI

from tests.python.engine.byte_tokenizer import byte_tokenizer_json

ROOT = Path(__file__).resolve().parents[3]
START_S = 120


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class ServerProcess:
    """Started when entered, ended with SIGTERM when left.

    Args:
        command: arguments of the Python interpreter.
    """

    def __init__(self, command: Sequence[str], *, wait_ready: bool = True) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if match is None:
            raise AssertionError(f"the server did not start: {line}{self._process.communicate()[1]}")
        self.port = int(match[1])
        self.pid = self._process.pid
        if wait_ready:
            self.wait_until(lambda: self.get("/health").status == 200, START_S)

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
        code, errors = self.wait(30)
        if kind is not None:
            print(f"server ended with {code}:\n{errors}")

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    def close_stdout(self) -> None:
        """Read nothing more of what the server prints."""
        assert self._process.stdout is not None
        self._process.stdout.close()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, timeout: float) -> tuple[int, str]:
        """(exit code, standard error)."""
        errors = self._process.communicate(timeout=timeout)[1]
        return self._process.returncode, errors

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @staticmethod
    def wait_until(condition: Any, timeout: float) -> float:
        """Seconds until the condition held; fails where it takes longer."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < timeout, f"not within {timeout} s"
            time.sleep(0.02)
        return time.monotonic() - start

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        connection = self.connect()
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        """``body``: bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, data, {"content-type": "application/json"} | (headers or {}))

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, the last being the text ``[DONE]`` where it is complete."""
        answer = self.post(path, body | {"stream": True})
        assert answer.status == 200, answer.body
        lines = [line.removeprefix(b"data: ") for line in answer.body.split(b"\n\n") if line]
        return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]

    def client(self, **options: Any) -> OpenAI:
        options = {"api_key": "none", "max_retries": 0} | options
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", **options)


def serve_model(folder: Path | str, *arguments: str) -> ServerProcess:
    return ServerProcess(
        ["-m", "tandem.cli", "serve", "--model", str(folder), "--port", "0", "--num-threads", "1", *arguments]
    )


def serve_scripted(folder: Path, *engine_arguments: str, wait_ready: bool = True, **options: Any) -> ServerProcess:
    """A server over the scripted engine; ``options`` are fields of `ServerOptions`."""
    (folder / "tokenizer.json").write_text(byte_tokenizer_json(), encoding="utf-8")
    return ServerProcess(
        [
            "-m",
            "tests.python.serve.serve_scripted",
            str(folder),
            json.dumps(options),
            json.dumps(list(engine_arguments)),
        ],
        wait_ready=wait_ready,
    )


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A process that has ended stays until its parent has read its code.
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
