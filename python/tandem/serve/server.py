"""Runs the server: socket, engine process, HTTP, and an orderly end."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Sequence
from types import FrameType

import uvicorn
import uvloop

from tandem.engine.chat import ChatTemplate
from tandem.engine.tokenizer import Tokenizer
from tandem.serve.app import make_app
from tandem.serve.canary_prompts import CanaryPromptsError, default_path, read_prompts
from tandem.serve.canary_watch import CanaryWatch
from tandem.serve.connection import ConnectionLimits, bounded_protocol
from tandem.serve.engine_client import EngineClient
from tandem.serve.errors import EngineStartError, ServerSetupError
from tandem.serve.metrics import ServerMetrics
from tandem.serve.options import ServerOptions
from tandem.serve.service import Service

_log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_ENGINE_DIED = 3
# After the grace, aborted requests still have to reach their clients.
_LAST_WORDS_S = 2
# Nothing is generated any more, so what clients do not take at once must not put off a new start.
_LAST_WORDS_OF_THE_DEAD_S = 0.4


class _HttpServer(uvicorn.Server):
    """uvicorn's server, whose signals begin an orderly end; a second one ends it at once."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.exit_asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signal."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._loop.call_soon_threadsafe(self.exit_asked.set)


def run_server(options: ServerOptions) -> int:
    """Serve until a signal comes or the engine dies; returns the exit code.

    Raises:
        ServerSetupError: the address cannot be listened on.
        EngineStartError: the engine cannot be built.
        TokenizerError: the model's tokenizer is missing or malformed.
        CanaryPromptsError: the canary's prompts are malformed, or cannot be replayed on this engine.
    """
    tokenizer = Tokenizer.from_pretrained(options.model_path)
    chat_template = ChatTemplate.from_pretrained(options.model_path)
    metrics = ServerMetrics(options.served_model_name)
    client = EngineClient(options, metrics.observe_request)
    canary = _canary(options, tokenizer, chat_template, client, metrics)
    service = Service(options, client, tokenizer, chat_template, metrics)
    listener = _listen(options)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(service, canary, listener))


def _canary(
    options: ServerOptions,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate,
    client: EngineClient,
    metrics: ServerMetrics,
) -> CanaryWatch | None:
    if options.canary_interval_s is None:
        if options.canary_prompts is not None:
            raise ServerSetupError(f"the canary's prompts {options.canary_prompts} are given without its interval")
        return None
    path = options.canary_prompts or default_path(options.model_path)
    prompts = read_prompts(path, tokenizer, chat_template)
    return CanaryWatch(prompts, options.canary_interval_s, options.canary_allowance, client, metrics)


async def _serve(service: Service, canary: CanaryWatch | None, listener: socket.socket) -> int:
    options, client = service.options, service.client
    config = uvicorn.Config(
        make_app(service, canary),
        http=bounded_protocol(ConnectionLimits(options.send_timeout_s, options.head_timeout_s)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=options.access_log,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(options.shutdown_grace_s) + _LAST_WORDS_S,
    )
    server = _HttpServer(config)
    await client.start()
    port = listener.getsockname()[1]
    _say(f"listening on http://{_in_url(options.host)}:{port}, loading {options.served_model_name}")
    # What is there now stays: looking through it again for garbage would hold up every stream for tens of milliseconds.
    gc.collect()
    gc.freeze()
    replaying = [] if canary is None else [asyncio.create_task(_replay(canary, server))]
    for task in replaying:
        task.add_done_callback(_say_why_it_stopped)
    others = (_announce(client, server), _drain(client, server, options, replaying))
    tasks = [*replaying, *(asyncio.create_task(task) for task in others)]
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        died = client.died.is_set()
        await client.stop()
        gc.unfreeze()  # the last look before the interpreter ends has to see everything
    for result in results:
        if isinstance(result, Exception):
            raise result
    return EXIT_ENGINE_DIED if died else EXIT_OK


async def _announce(client: EngineClient, server: _HttpServer) -> None:
    """Say when requests are served; end the server where they will never be."""
    try:
        ready = await client.wait_ready()
    except EngineStartError:
        server.should_exit = True
        raise
    _say(f"ready after {ready.load_seconds:.1f} s, {ready.max_model_len} tokens per request")
    await client.died.wait()
    _log.error("the engine process has died; the server ends")
    server.should_exit = True
    await asyncio.sleep(_LAST_WORDS_OF_THE_DEAD_S)
    server.force_exit = True


async def _replay(canary: CanaryWatch, server: _HttpServer) -> None:
    """End the server where the canary is none for its engine."""
    try:
        await canary.run()
    except CanaryPromptsError:
        server.should_exit = True
        raise


def _say_why_it_stopped(replaying: asyncio.Task[None]) -> None:
    """A canary that is not replayed any more would seem to be well."""
    if not replaying.cancelled() and (error := replaying.exception()) is not None:
        _log.error("the canary has stopped: %s: %s", type(error).__name__, error)


async def _drain(
    client: EngineClient, server: _HttpServer, options: ServerOptions, replaying: Sequence[asyncio.Task[None]]
) -> None:
    await server.exit_asked.wait()
    for task in replaying:
        task.cancel()
    await client.drain(options.shutdown_grace_s)


def _say(text: str) -> None:
    """Tell whoever started the server; it serves just as well where nobody reads any more."""
    try:
        print(f"tandem: {text}", flush=True)
    except BrokenPipeError:
        sys.stdout = None  # what is buffered cannot be written any more


def _listen(options: ServerOptions) -> socket.socket:
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((options.host, options.port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise ServerSetupError(f"cannot listen on {options.host}:{options.port}: {error}") from error


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
