"""What the drafter is trained on and measured by, against slow and plain versions of the same."""

import random

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tandem import LLM, SamplingParams, demo
from tandem.engine.outputs import RequestOutput
from tandem.engine.speculation import RoundCounts
from tandem.eval.retrieval_data import held_out_documents
from tools.demo_model.acceptance import AcceptanceProbe, Reply, mix_heads, summary, walk
from tools.demo_model.chat import LOOKUP, NONE, QUESTION, REPLY, ChatEncoder
from tools.demo_model.drafter_model import Bases, Drafter, DraftFunctions, DraftWeights
from tools.demo_model.evaluate import Evaluator
from tools.demo_model.export import load_checkpoint, load_drafter
from tools.demo_model.model import Compiled, Weights
from tools.demo_model.shape import Shape, tiny
from tools.demo_model.supervision import Texts, unroll_texts
from tools.demo_model.teacher import Rows, Teacher

STEPS = 4
QUESTION_THEN_REPLY = [QUESTION] * 5 + [REPLY] * 9 + [QUESTION] * 3 + [REPLY] * 3 + [LOOKUP] * 4 + [NONE] * 4


def counted_slowly(kinds: list[int], said: list[bool], segments: list[int]) -> set[tuple[int, int]]:
    """Return the (slot, step) whose label lies in the reply that the target would have said up to the slot's token."""
    places = set()
    replies = [kind in (REPLY, LOOKUP) for kind in kinds]
    for slot in range(len(kinds)):
        for step in range(STEPS):
            label = slot + step + 2
            if label >= len(kinds) or not replies[label]:
                continue
            start = label
            while start > 0 and replies[start - 1] and segments[start - 1] == segments[start]:
                start -= 1
            if slot + 1 >= start and all(said[index] for index in range(start + 1, label)):
                places.add((slot, step))
    return places


@pytest.mark.parametrize("packed", [False, True])
def test_a_slot_counts_only_while_the_target_would_have_said_the_reply_so_far(packed: bool) -> None:
    rng = random.Random(5)
    length = len(QUESTION_THEN_REPLY)
    segments = [0] * 9 + [1] * (length - 9) if packed else [0] * length
    tokens = torch.tensor([[rng.randrange(100) for _ in range(length)]])
    predicted = tokens.roll(-1, 1)
    for index in (10, 22):
        predicted[0, index - 1] += 1
    said = [index not in (10, 22) for index in range(length)]
    rows = Rows(tokens, torch.tensor([segments]) if packed else None)
    texts = Texts(rows, torch.tensor([QUESTION_THEN_REPLY]))
    generator = torch.Generator().manual_seed(1)
    unroll = unroll_texts(texts, predicted, bases_per_row=length, steps=STEPS, generator=generator)
    slots = unroll.bases.at[0].tolist()
    assert slots == list(range(length))
    counted = {(slot, step) for step in range(STEPS) for slot in slots if unroll.counted[step, slot]}
    assert counted == counted_slowly(QUESTION_THEN_REPLY, said, segments)
    for slot, step in counted:
        assert unroll.token_ids[step, slot] == tokens[0, slot + step + 1]
        assert unroll.labels[step, slot] == predicted[0, slot + step + 1]
        assert segments[int(unroll.bases.first[0, slot])] == segments[slot]
        assert unroll.bases.first[0, slot] == segments.index(segments[slot])


def test_a_digit_to_look_up_lies_in_the_slot_whose_token_it_is() -> None:
    length = len(QUESTION_THEN_REPLY)
    tokens = torch.arange(length)[None]
    sources = torch.full((1, length), -1)
    sources[0, 19:23] = torch.arange(4) + 2
    texts = Texts(Rows(tokens), torch.tensor([QUESTION_THEN_REPLY]), sources)
    unroll = unroll_texts(texts, tokens + 1, bases_per_row=length, steps=STEPS, generator=torch.Generator())
    # Index 19's next token repeats the digit at index 2, the token of slot 1; slot 18 guesses it in its first step.
    assert unroll.sources[0, 18] == 1
    assert unroll.sources[2, 17] == 2
    assert unroll.sources[0, 17] == -1


def test_a_step_attends_to_the_slots_up_to_its_base_and_to_the_steps_before_it() -> None:
    shape = tiny()
    weights = DraftWeights(shape, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in (weights.o, weights.down):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    target = Weights(shape, seed=3)
    functions = DraftFunctions(shape, compile_functions=False, kernels=False)
    drafter = Drafter(weights.requires_grad_(False), target.requires_grad_(False), functions, torch.float32)
    length = 12
    aux = torch.randn(3, 2 * length, shape.hidden, generator=generator)
    ids = torch.randint(shape.vocab_size, (2 * length,), generator=generator)
    entries = drafter.entries(aux, ids, torch.arange(length).repeat(2))
    at, first = torch.tensor([[2, 7], [5, 11]]), torch.tensor([[0, 4], [0, 0]])
    token_ids = torch.randint(shape.vocab_size, (STEPS, 4), generator=generator)
    steps = list(drafter.unroll(entries, [Bases(length, at, first)], token_ids))
    named = dict(weights.named_parameters())
    for number in range(4):
        row, base, start = number // 2, int(at.flatten()[number]), int(first.flatten()[number])
        seen = slice(row * length + start, row * length + base + 1)
        keys, values = list(entries.k[seen]), list(entries.v[seen])
        hidden = entries.hidden[row * length + base][None]
        for step in range(STEPS):
            tokens = target.embed[token_ids[step, number]][None]
            rope = rope_over_whole_head(shape, base + step)
            q, k, v = (part[0] for part in functions.project_steps(tokens, hidden, *rope, named))
            if step > 0:
                keys.append(k)
                values.append(v)
            k, v = (torch.stack(part).repeat_interleave(shape.heads_per_group, 1) for part in (keys, values))
            share = torch.softmax(torch.einsum("hd,khd->hk", q, k) * shape.head_dim**-0.5, -1)
            hidden = functions.finish(hidden, torch.einsum("hk,khd->hd", share, v)[None], named)
            torch.testing.assert_close(steps[step].y[number], hidden[0])


def rope_over_whole_head(shape: Shape, position: int) -> tuple[Tensor, Tensor]:
    exponents = torch.arange(0, shape.head_dim, 2) / shape.head_dim
    angles = (position * shape.rope_theta**-exponents)[None]
    return angles.cos(), angles.sin()


@pytest.mark.parametrize(
    ("runs", "accepted"),
    [
        # Tokens 0 and 1 are the prompt, 2 comes from the target, and the first round starts at slot 1.
        ([9, 3, 9, 9, 9, 2, 9, 9], [3, 2]),
        ([9, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
        ([9, 2, 9, 9, 1, 9, 9, 9], [2, 1]),
    ],
)
def test_rounds_follow_each_other_until_the_last_token_is_known(runs: list[int], accepted: list[int]) -> None:
    assert walk(runs, prompt=2, length=8).accepted == accepted


def test_drafts_past_the_end_count_as_drafted_and_not_accepted() -> None:
    counts = summary([walk([9, 3, 9, 9, 9, 1, 9, 9], prompt=2, length=8)], drafts=3)
    assert (counts["rounds"], counts["rate"], counts["per_position"]) == (2, round(4 / 6, 4), [1.0, 0.5, 0.5])


def test_mixed_heads_are_those_of_a_page_read_in_the_wrong_order() -> None:
    length, groups, prompt = 300, 4, 140
    entry = torch.randn(1, length, groups, 2, generator=torch.Generator().manual_seed(3))
    page_count = 3
    stored = torch.zeros(page_count, 4, groups, 32, 2)
    for index in range(1, prompt + 1):
        stored[index // 128, index % 128 // 32, :, index % 32] = entry[0, index - 1]
    read = stored.view(page_count, groups, 128, 2)
    mixed = mix_heads(entry, torch.tensor([prompt]))
    for index in range(1, length + 1):
        expected = read[index // 128, :, index % 128] if index <= prompt else entry[0, index - 1]
        assert torch.equal(mixed[0, index - 1], expected)


def probe() -> AcceptanceProbe:
    folder, shape = demo.path(), Shape()
    weights = load_checkpoint(shape, folder).requires_grad_(False)
    functions = Compiled(shape, compile_functions=False)
    drafting = DraftFunctions(shape, compile_functions=False, kernels=False)
    drafter = Drafter(load_drafter(shape, folder / "eagle3").requires_grad_(False), weights, drafting, torch.float32)
    chat = ChatEncoder(Tokenizer.from_file(str(folder / "tokenizer.json")))
    return AcceptanceProbe(
        Evaluator(weights, chat, functions, torch.float32), Teacher(weights, functions, torch.float32), drafter, 512
    )


def served(questions: list[str], draft_len: int) -> list[RequestOutput]:
    turns = [[{"role": "user", "content": question}] for question in questions]
    with LLM("demo", drafter=demo.path() / "eagle3", draft_len=draft_len, max_model_len=1152, max_seats=1) as llm:
        return llm.chat(turns, SamplingParams(temperature=0, max_tokens=300), progress=False)


@pytest.mark.slow
def test_the_engine_accepts_the_drafts_that_the_unrolls_promise() -> None:
    measured = probe()
    (document,) = held_out_documents(700, 1, measured.chat.count)
    questions = [problem.question for problem in demo.held_out_word_problems()[:1]] + [document.prompt()]
    by_draft_len = {draft_len: served(questions, draft_len) for draft_len in (3, 7)}
    for number, output in enumerate(by_draft_len[3]):
        assert output.finish_reason == "stop"
        reply = Reply(output.prompt_token_ids + output.token_ids, output.prompt_tokens)
        packed = len(reply.ids) <= 512
        runs = measured.runs([reply], 512 if packed else 1024, packed=packed)
        for draft_len, outputs in by_draft_len.items():
            promised = walk(runs[draft_len - 1, 0].tolist(), reply.prompt, len(reply.ids)).accepted
            counts = RoundCounts(len(promised), draft_len * len(promised), sum(promised))
            assert outputs[number].rounds == counts
            assert counts.rate is not None
            assert counts.rate > 0.7
