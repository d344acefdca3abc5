"""On the shipped demo model and held-out documents we compute what transformers computes, far beyond top-k x block."""

from functools import cache

import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tandem import demo
from tandem.eval.retrieval_data import WordCounter, held_out_documents
from tandem.models import MiniMaxM3Config, load_model
from tandem.models.config import read_config_file
from tandem.models.minimax_m3_weights import TEXT_PREFIX

from .comparison import IMPLEMENTATIONS, assert_same_model, generated
from .support import transformers_model

pytestmark = pytest.mark.slow


@cache
def document(num_tokens: int) -> list[int]:
    """Return the first `num_tokens` token ids of a held-out document."""
    tokenizer = Tokenizer.from_file(str(demo.path() / "tokenizer.json"))
    count_tokens = WordCounter(lambda text: len(tokenizer.encode(text).ids))
    (drawn,) = held_out_documents(num_tokens + 200, 1, count_tokens)
    ids = tokenizer.encode(drawn.text).ids[:num_tokens]
    assert len(ids) == num_tokens
    return ids


@cache
def oracle(ids: tuple[int, ...]) -> Tensor:
    """Return transformers' logits of every token of `ids`."""
    text = read_config_file(demo.path())["text_config"]
    stored = safetensors.torch.load_file(demo.path() / "model.safetensors")
    tensors = {name.removeprefix(TEXT_PREFIX): tensor for name, tensor in stored.items()}
    with torch.no_grad():
        return transformers_model(text, tensors, "sdpa")(torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize(
    ("num_tokens", "implementation", "chunks"),
    [
        (2000, "reference", (2000,)),
        (2000, "cpu", (700, 1, 640, 659)),
        (4000, "cpu", (2048, 1952)),
    ],
)
def test_logits_and_greedy_tokens_equal_those_of_transformers(
    num_tokens: int, implementation: str, chunks: tuple[int, ...]
) -> None:
    config = MiniMaxM3Config.from_pretrained(demo.path())
    assert num_tokens > 3 * config.topk_blocks * config.block_size
    ops, backend = IMPLEMENTATIONS[implementation]
    model = load_model(demo.path(), torch.float32, ops())
    ids, ours = generated(model, backend, document(num_tokens), chunks)
    assert_same_model(ids, ours, oracle(tuple(ids[:-1])), num_tokens)
