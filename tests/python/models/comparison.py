"""Our generated text against transformers.

transformers runs once over the prompt and our own greedy tokens: where each of them is the argmax of the row before it,
decoding there would have produced the same text.
"""

import torch
from torch import Tensor

from tandem.models import CpuOps, MiniMaxM3, Ops, ReferenceOps
from tandem.msa import AttentionBackend, CpuBackend, ReferenceBackend

from .runner import Runner

NUM_STEPS = 200
IMPLEMENTATIONS: dict[str, tuple[type[Ops], type[AttentionBackend]]] = {
    "reference": (ReferenceOps, ReferenceBackend),
    "cpu": (CpuOps, CpuBackend),
}


def generated(
    model: MiniMaxM3, backend: type[AttentionBackend], prompt: list[int], chunks: tuple[int, ...]
) -> tuple[list[int], Tensor]:
    """Feed the prompt in chunks and decode greedily; return all ids, and the logits [T, V] of every one fed."""
    assert sum(chunks) == len(prompt)
    runner = Runner(model, backend, len(prompt) + NUM_STEPS)
    rows, start = [], 0
    for size in chunks:
        rows.append(runner.feed(prompt[start : start + size])[0])
        start += size
    ids = [*prompt, int(rows[-1][-1].argmax())]
    for token, logits in runner.greedy(ids[-1], NUM_STEPS - 1):
        rows.append(logits.unsqueeze(0))
        ids.append(token)
    return ids, torch.cat(rows)


def assert_same_model(ids: list[int], ours: Tensor, theirs: Tensor, num_prompt: int) -> None:
    largest = float(theirs.abs().max())
    assert largest > 1
    difference = float((ours - theirs).abs().max())
    assert difference <= 1e-4 * largest, f"logits differ by {difference} at a largest logit of {largest}"
    best = theirs[num_prompt - 1 :].topk(2).values
    # The same token, unless the two best are closer than fp32 sums of another order can tell apart.
    sure = (best[:, 0] - best[:, 1]) > 1e-4 * largest
    tokens = torch.tensor(ids[num_prompt:])
    assert tokens.shape == (NUM_STEPS,)
    assert torch.equal(tokens[sure], theirs[num_prompt - 1 :].argmax(-1)[sure])
    assert sure.sum() >= 0.98 * NUM_STEPS
