"""The class that most users need: a model, ready to generate."""

from __future__ import annotations

import logging
import queue
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard, cast

from tandem.engine.build import (
    DEFAULT_DRAFT_LEN,
    BackendName,
    BuiltEngine,
    DtypeName,
    EngineOptions,
    build_engine,
    model_folder,
)
from tandem.engine.chat import ChatTemplate, Message
from tandem.engine.engine import Engine, EngineStats
from tandem.engine.errors import InvalidParameterError, InvalidPromptError
from tandem.engine.limits import SizeRequest
from tandem.engine.loop import EngineThread
from tandem.engine.outputs import Delta, RequestOutput
from tandem.engine.params import SamplingParams
from tandem.engine.tokenizer import Tokenizer
from tandem.models import MiniMaxM3Config
from tandem.models.eagle3_config import find_drafter
from tandem.msa import AttentionBackend, Limits

_log = logging.getLogger(__name__)

Prompt = str | Sequence[int]


class LLM:
    """A loaded model that serves any number of requests at once, from any number of threads.

    ::

        with LLM("demo") as llm:
            for output in llm.generate(["one", "two"], SamplingParams(temperature=0)):
                print(output.text)

    Args:
        model: a model folder, or ``demo`` for the model that comes with the package.
        drafter: folder of an Eagle3 drafter of the model, which then proposes tokens in each step. The text is the same
            with and without. ``auto`` takes the folder ``eagle3`` inside the model's, where there is one; None proposes
            nothing.
        draft_len: tokens proposed per step and sequence, 0 to 7; by default 3 with a drafter.
        max_speculating_rows: with more sequences than this decoding at once, a step verifies and proposes no drafts,
            since it has enough tokens without them; 16 by default.
        dtype: type of weights and activations, ``float32`` or ``bfloat16``. Norms and routers are always fp32.
        kv_dtype: type of the cached keys and values; that of ``dtype`` by default.
        kv_cache_bytes: size of the page pool. By default half of the memory that is really free (control groups are
            heeded), but no more than ``max_seats`` sequences of full length can use.
        max_model_len: most tokens of one sequence, prompt and output together; the model's own limit by default.
        max_seats: most sequences that run at once; others wait.
        max_tokens_per_step: most tokens of one step; longer prompts are cut into chunks.
        enable_prefix_cache: reuse the pages of prompts that begin alike.
        num_threads: threads of the kernels; all processors of the process by default. Sets torch's number as well.
        seed: makes requests without a seed of their own repeatable, in order of submission.
        overlap: plan and launch each step while the one before it still runs. The text is the same with and without.
        backend: ``cpu`` for the compiled kernels, ``reference`` for plain torch, slow and easy to check.
        poison_pool: fill cache memory that holds nothing with NaN; for debugging.
        wrap_attention: replaces the attention backend by what it returns; for evaluations that damage it.

    Raises:
        CheckpointError: the model folder is at fault: a file is missing or truncated, a tensor is missing or misshaped,
            or the architecture is another one.
        TokenizerError: the tokenizer is missing or malformed.
        InvalidParameterError: an argument is out of range.
        PoolTooSmallError: the pool cannot hold one sequence of ``max_model_len`` tokens.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        drafter: str | Path | None = "auto",
        draft_len: int | None = None,
        max_speculating_rows: int | None = None,
        dtype: DtypeName = "float32",
        kv_dtype: DtypeName | None = None,
        kv_cache_bytes: int | None = None,
        max_model_len: int | None = None,
        max_seats: int | None = None,
        max_tokens_per_step: int | None = None,
        enable_prefix_cache: bool = True,
        num_threads: int | None = None,
        seed: int | None = None,
        overlap: bool = True,
        backend: BackendName = "cpu",
        poison_pool: bool = False,
        wrap_attention: Callable[[AttentionBackend], AttentionBackend] | None = None,
    ) -> None:
        drafter = find_drafter(drafter, model_folder(model))
        _log.info("drafter: %s", drafter or "none")
        if draft_len is None:
            draft_len = 0 if drafter is None else DEFAULT_DRAFT_LEN
        options = EngineOptions(
            model=model,
            drafter=drafter,
            dtype=dtype,
            kv_dtype=kv_dtype,
            sizes=SizeRequest(kv_cache_bytes, max_model_len, max_seats, max_tokens_per_step, draft_len),
            enable_prefix_cache=enable_prefix_cache,
            num_threads=num_threads,
            backend=backend,
            seed=seed,
            overlap=overlap,
            max_speculating_rows=max_speculating_rows,
            poison_pool=poison_pool,
            wrap_attention=wrap_attention,
        )
        MiniMaxM3Config.from_pretrained(options.model_path)
        self.tokenizer = Tokenizer.from_pretrained(options.model_path)
        self.chat_template = ChatTemplate.from_pretrained(options.model_path)
        built: list[BuiltEngine] = []

        def build() -> Any:
            built.append(build_engine(options, self.tokenizer))
            return built[0].engine

        self._thread = EngineThread(build)
        self._engine = self._thread.engine
        self._built = built[0]
        # Also runs when the interpreter ends, so that no step is running while it is torn down.
        self._finalizer = weakref.finalize(self, self._thread.close)

    @property
    def engine(self) -> Engine:
        """The engine; only the calls that are open to any thread may be made."""
        return self._engine

    @property
    def limits(self) -> Limits:
        """The sizes that the arguments were resolved to."""
        return self._built.limits

    @property
    def config(self) -> MiniMaxM3Config:
        """The model's configuration."""
        return self._built.config

    @property
    def load_seconds(self) -> float:
        """How long loading took."""
        return self._built.load_seconds

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Run one prompt or many to their ends; the outputs stand in the order of the prompts.

        Args:
            prompts: a text or a list of token ids, or a sequence of these. Nothing is added to a text.
            params: for all prompts, or one for each; the defaults of `SamplingParams` if None.
            progress: show a progress bar; by default where there is more than one prompt.

        Returns:
            One output per prompt. A request that fails on the way has ``finish_reason`` ``error`` and says why; the
            others are not disturbed.

        Raises:
            InvalidPromptError: a prompt is empty, too long, or holds ids outside the vocabulary. Nothing has run then.
            InvalidParameterError: the number of params is not that of the prompts.
            EngineClosedError: `close` was called.
        """
        pairs = [self._encode(prompt) for prompt in _as_list(prompts)]
        every = _params_for(len(pairs), params)
        for (_, ids), one in zip(pairs, every, strict=True):
            self._engine.check(ids, one)
        arrived: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        places = {}
        for place, ((text, ids), one) in enumerate(zip(pairs, every, strict=True)):
            places[self._engine.submit(ids, one, arrived.put, prompt=text)] = place
        return self._gather(arrived, places, len(pairs) > 1 if progress is None else progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or many, rendered with the model's chat template.

        Args:
            messages: the turns of a conversation, each with ``role`` and ``content``; or several conversations.
            params: as in `generate`.
            progress: as in `generate`.
            template_options: as in `ChatTemplate.render`, such as ``thinking_mode``.

        Raises:
            InvalidChatError: a conversation does not fit the template.
        """
        prompts = [self.encode_chat(turns, **template_options) for turns in _as_conversations(messages)]
        return self.generate(prompts, params, progress=progress)

    def encode_chat(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """Token ids of a conversation's prompt; options as in `ChatTemplate.render`."""
        return self.chat_template.encode(self.tokenizer, messages, **template_options)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Yield what the request gains step by step; the last delta holds the whole output.

        The request is submitted at once. An iterator that is dropped before its end aborts its request.

        Raises:
            As `generate`, at once.
        """
        text, ids = self._encode(prompt)
        arrived: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        request_id = self._engine.submit(ids, params or SamplingParams(), arrived.put, prompt=text, stream=True)
        return self._deltas(request_id, arrived)

    def abort(self, request_id: int) -> None:
        """End a request soon, with ``finish_reason`` ``abort``; without effect where it has ended."""
        self._engine.abort(request_id)

    def stats(self) -> EngineStats:
        """Counters of the scheduler, states of the pages, seconds per part of the steps, and the progress counter.

        Its ``speculation`` says what became of drafts, by route and position.
        """
        return self._engine.call(self._engine.stats).result()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self._engine.call(self._engine.reset_prefix_cache).result()

    def close(self) -> None:
        """Stop the engine; requests that still run end as aborted. May be called again."""
        self._finalizer()

    def __enter__(self) -> LLM:
        """The object itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        ids: object = prompt  # whatever came
        if not isinstance(ids, Sequence) or any(type(i) is not int for i in ids):
            raise InvalidPromptError("a prompt is a text or a sequence of integer token ids")
        return None, list(ids)

    def _gather(self, arrived: queue.SimpleQueue[Delta], places: dict[int, int], progress: bool) -> list[RequestOutput]:
        import tqdm  # type: ignore[import-untyped]

        outputs: dict[int, RequestOutput] = {}
        generated = 0
        start = time.perf_counter()
        try:
            with tqdm.tqdm(total=len(places), disable=not progress, unit="prompt", dynamic_ncols=True) as bar:
                while len(outputs) < len(places):
                    output = arrived.get().output
                    assert output is not None
                    outputs[places[output.request_id]] = output
                    generated += output.completion_tokens
                    bar.set_postfix_str(f"{generated / (time.perf_counter() - start):.1f} tokens/s", refresh=False)
                    bar.update()
        finally:
            if len(outputs) < len(places):
                for request_id, place in places.items():
                    if place not in outputs:
                        self._engine.abort(request_id)
        return [outputs[place] for place in range(len(places))]

    def _deltas(self, request_id: int, arrived: queue.SimpleQueue[Delta]) -> Iterator[Delta]:
        done = False
        try:
            while not done:
                delta = arrived.get()
                done = delta.output is not None
                yield delta
        finally:
            if not done:
                self._engine.abort(request_id)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt, text or ids, as a list of one."""
    return [prompts] if _is_prompt(prompts) else list(cast(Sequence[Prompt], prompts))


def _is_prompt(prompts: Prompt | Sequence[Prompt]) -> TypeGuard[Prompt]:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> Sequence[Sequence[Message]]:
    """A single conversation as a list of one; an empty one stays to be refused."""
    return [messages] if _is_conversation(messages) else cast(Sequence[Sequence[Message]], messages)


def _is_conversation(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> TypeGuard[Sequence[Message]]:
    return not messages or isinstance(messages[0], dict)


def _params_for(count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidParameterError("params", f"{len(params)} of them", f"one for all, or one for each of {count}")
    return list(params)
