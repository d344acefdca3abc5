"""What the drafter is to say: bases in replies that the target would itself have written, and the target's next words.

The texts are given, and the labels are the target's argmax in them. A slot counts only while every token of its reply
so far is what the target would have said, so that drafting sees the same context when it is used.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.demo_model.chat import LOOKUP, REPLY
from tools.demo_model.drafter_model import Bases
from tools.demo_model.teacher import Rows


@dataclass(frozen=True)
class Texts:
    """Texts to learn from: rows with the tokens' `kinds` u8 [R, C].

    `sources` [R, C], given for documents, is where the digit stands that a position's next token repeats, else -1.
    """

    rows: Rows
    kinds: Tensor
    sources: Tensor | None = None


@dataclass(frozen=True)
class Unroll:
    """Unrolls of K steps from the bases of rows, all [K, R * S].

    Step j takes `token_ids`; its label, the target's argmax, counts where `counted`. `sources` are the slots of the
    row that hold the digit the label looks up, -1 where there is none.
    """

    bases: Bases
    token_ids: Tensor
    labels: Tensor
    counted: Tensor
    sources: Tensor


def in_reply(texts: Texts) -> tuple[Tensor, Tensor]:
    """Return which tokens belong to a reply, and which of them do not begin it, both bool [R, C]."""
    reply = (texts.kinds == REPLY) | (texts.kinds == LOOKUP)
    before = F.pad(reply[:, :-1], (1, 0))
    if texts.rows.segments is not None:
        segments = texts.rows.segments
        before = before & (segments == F.pad(segments[:, :-1], (1, 0), value=-1))
    return reply, reply & before


def own_words(texts: Texts, predicted: Tensor) -> Tensor:
    """Return the tokens of replies up to which the target would have said all, bool [R, C].

    `predicted` [R, C] is the target's argmax after each token. The token that opens a reply is the prompt's.
    """
    reply, inner = in_reply(texts)
    said = F.pad(predicted[:, :-1], (1, 0)) == texts.rows.tokens
    errors = (inner & ~said).cumsum(1)
    errors_before_reply = torch.where(reply & ~inner, errors, 0).cummax(1).values
    return reply & (errors == errors_before_reply)


def unroll_texts(
    texts: Texts, predicted: Tensor, *, bases_per_row: int, steps: int, generator: torch.Generator
) -> Unroll:
    """Choose the bases of every row, at random where there are too many, and return their unrolls.

    `predicted` [R, C] is the target's argmax after each token.
    """
    tokens = texts.rows.tokens
    own, (_, inner) = own_words(texts, predicted), in_reply(texts)
    useful = F.pad(own[:, 1:-1] & inner[:, 2:], (0, 2))
    order = useful + 0.5 * torch.rand(useful.shape, device=useful.device, generator=generator)
    at = order.topk(bases_per_row, dim=1).indices.sort(1).values
    columns = list(_later(at, tokens.shape[1], steps))
    going_on = useful.gather(1, at)
    token_ids, labels, counted, sources = [], [], [], []
    for step, (column, inside) in enumerate(columns[:-1]):
        following, follows = columns[step + 1]
        if step > 0:
            going_on = going_on & inside & own.gather(1, column) & inner.gather(1, column)
        token_ids.append(tokens.gather(1, column))
        labels.append(predicted.gather(1, column))
        counted.append(going_on & follows & inner.gather(1, following))
        if texts.sources is None:
            sources.append(torch.full_like(at, -1))
        else:
            # The digit at index d is the token of slot d - 1.
            sources.append(texts.sources.gather(1, column).clamp(min=0) - 1)
    bases = Bases(tokens.shape[1], at, _first_slots(texts.rows).gather(1, at))
    stacked = (torch.stack(part).flatten(1) for part in (token_ids, labels, counted, sources))
    return Unroll(bases, *stacked)


def _later(at: Tensor, length: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the indices at + 1, at + 2, ... up to one past the last step's, kept in the row, and which were in it."""
    for ahead in range(1, steps + 2):
        yield (at + ahead).clamp(max=length - 1), at + ahead < length


def _first_slots(rows: Rows) -> Tensor:
    """Return the first slot of each token's conversation, [R, C]."""
    if rows.segments is None:
        return torch.zeros_like(rows.tokens)
    begins = rows.segments != F.pad(rows.segments[:, :-1], (1, 0), value=-1)
    indices = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    return torch.where(begins, indices, 0).cummax(1).values
