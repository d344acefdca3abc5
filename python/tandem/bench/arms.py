"""What is compared: the engine and transformers, both decoding greedily from the same prompts."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tandem.core import cpu
from tandem.engine.build import BuiltEngine, DtypeName, EngineOptions, build_engine
from tandem.engine.limits import SizeRequest
from tandem.engine.outputs import Delta, RequestOutput
from tandem.engine.params import SamplingParams
from tandem.engine.speculation import SpeculationStats
from tandem.engine.tokenizer import Tokenizer

Prompts = list[list[int]]


@dataclass(frozen=True)
class Window:
    """A stretch of decoding: `tokens` [B][W] of the B sequences, and the time of each of its W steps.

    `cpu_seconds` is the processor time of all steps together, over all threads of the process; other programs on the
    machine change it little.
    """

    tokens: list[list[int]]
    seconds: list[float]
    cpu_seconds: float


class Arm(ABC):
    """Decodes the same stretch as often as asked; everything before the first decode step is outside its times."""

    @abstractmethod
    def prepare(self, prompts: Prompts) -> None:
        """Take B prompts of equal length and fill the cache with them."""

    @abstractmethod
    def window(self, num_tokens: int) -> Window:
        """Decode `num_tokens` tokens for each sequence, starting right behind its prompt and first token."""


def set_threads(count: int) -> None:
    """Threads of the kernels and of torch."""
    cpu.set_num_threads(count)
    torch.set_num_threads(count)


class EngineArm(Arm):
    """The engine as it serves: scheduler, paged cache, model, sampling and output, without the text."""

    def __init__(
        self,
        folder: Path,
        dtype: DtypeName,
        max_model_len: int,
        max_batch: int,
        *,
        kv_dtype: DtypeName | None = None,
        drafter: Path | None = None,
        draft_len: int = 0,
    ) -> None:
        sizes = SizeRequest(max_model_len=max_model_len, max_seats=max_batch, draft_len=draft_len)
        options = EngineOptions(
            folder, drafter=drafter, dtype=dtype, kv_dtype=kv_dtype, sizes=sizes, num_threads=torch.get_num_threads()
        )
        self._built: BuiltEngine = build_engine(options, Tokenizer.from_pretrained(folder))
        self._prompts: Prompts = []

    def prepare(self, prompts: Prompts) -> None:
        """See `Arm`: the pages of the prompts stay in the prefix cache."""
        self._prompts = prompts
        self.window(1)

    def window(self, num_tokens: int) -> Window:
        """See `Arm`."""
        engine = self._built.engine
        outputs: dict[int, RequestOutput] = {}

        def take(delta: Delta) -> None:
            assert delta.output is not None
            outputs[delta.output.request_id] = delta.output

        params = SamplingParams(temperature=0.0, max_tokens=1 + num_tokens, ignore_eos=True)
        before = engine.stats().scheduler.num_generated_tokens
        ids = [engine.submit(prompt, params, take) for prompt in self._prompts]
        while engine.stats().scheduler.num_generated_tokens < before + len(ids):
            engine.step()
        seconds = []
        cpu_start = time.process_time()
        while len(outputs) < len(ids):
            start = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - start)
        cpu_seconds = time.process_time() - cpu_start
        return Window([outputs[request_id].token_ids[1:] for request_id in ids], seconds[:num_tokens], cpu_seconds)

    def reply_length(self, prompt: list[int], most: int) -> int:
        """Tokens of the reply to a prompt, its end included, or `most` where it is longer."""
        outputs: list[Delta] = []
        params = SamplingParams(temperature=0.0, max_tokens=most)
        self._built.engine.submit(prompt, params, outputs.append)
        while not outputs:
            self._built.engine.step()
        output = outputs[0].output
        assert output is not None
        return output.completion_tokens

    def speculation(self) -> SpeculationStats:
        """What became of drafts so far."""
        return self._built.engine.stats().speculation


class TransformersArm(Arm):
    """transformers' own model and cache, driven by the shortest possible loop."""

    _PREFILL_CHUNK = 128

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from tandem.bench.transformers_model import load

        self._model = load(folder, dtype)

    @torch.inference_mode()
    def prepare(self, prompts: Prompts) -> None:
        """See `Arm`: prefills in chunks, since its mask takes memory in proportion to query times context."""
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self._model.config)
        ids = torch.tensor(prompts)
        for part in torch.split(ids, self._PREFILL_CHUNK, dim=1):
            out = self._model(input_ids=part, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._first = out.logits[:, -1].argmax(dim=-1, keepdim=True)
        self.margins: list[list[float]] = []

    @torch.inference_mode()
    def window(self, num_tokens: int) -> Window:
        """See `Arm`. Leaves in `margins` [B][W] how far the best logit was above the second."""
        token = self._first
        tokens, seconds, margins = [], [], []
        cpu_seconds = 0.0
        for _ in range(num_tokens):
            cpu_start = time.process_time()
            start = time.perf_counter()
            logits = self._model(input_ids=token, past_key_values=self._cache, use_cache=True).logits[:, -1]
            token = logits.argmax(dim=-1, keepdim=True)
            seconds.append(time.perf_counter() - start)
            cpu_seconds += time.process_time() - cpu_start
            tokens.append(token[:, 0].tolist())
            best = logits.float().topk(2, dim=-1).values
            margins.append((best[:, 0] - best[:, 1]).tolist())
        self._cache.crop(-num_tokens)
        self.margins = np.array(margins).T.tolist()
        return Window(np.array(tokens).T.tolist(), seconds, cpu_seconds)
