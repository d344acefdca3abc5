"""Aborted, preempted or ended at any step of a run with drafts and overlap: clean books, every token emitted once."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tandem.engine.params import SamplingParams
from tests.python.engine.scripted import Collector, Rig, expected, make_rig

PROMPTS = [[100 + 7 * i % 150 for i in range(14)], [100 + 7 * i % 150 for i in range(9)], [33, 34]]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def speculating(draft_len: int, num_slots: int = 40) -> Rig:
    return make_rig(num_slots=num_slots, max_tokens_per_step=9, overlap=True, draft_len=draft_len)


def check_emitted(collector: Collector, prompt: Sequence[int], count: int | None = None) -> None:
    """The deltas hold each token of the output once, and the output is the beginning of the text (of `count`)."""
    output = collector.output
    assert [token for delta in collector.deltas for token in delta.token_ids] == output.token_ids
    assert output.token_ids == expected(prompt, len(output.token_ids))
    assert count is None or len(output.token_ids) == count


@pytest.mark.parametrize("draft_len", [1, 3, 7])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_an_abort_before_any_step_leaves_clean_books_and_the_others_untouched(victim: int, draft_len: int) -> None:
    num_aborted = 0
    step = 0
    while True:
        rig = speculating(draft_len)
        collectors = [rig.submit(prompt, GREEDY, stream=True) for prompt in PROMPTS]
        for _ in range(step):
            rig.engine.step()
        if collectors[victim].done:
            break
        rig.engine.abort(victim)
        rig.run()
        num_aborted += collectors[victim].output.finish_reason == "abort"
        for k, (prompt, collector) in enumerate(zip(PROMPTS, collectors, strict=True)):
            check_emitted(collector, prompt, None if k == victim else 12)
        rig.check_idle()
        step += 1
    assert num_aborted == step > 3


@pytest.mark.parametrize("draft_len", [1, 3, 7])
@pytest.mark.parametrize("stop", [False, True])
def test_an_end_at_any_token_cuts_its_round_there(stop: bool, draft_len: int) -> None:
    """By the limit or by a stop id; what was accepted behind it is neither returned nor left in the prefix cache."""
    rig = speculating(draft_len)
    text = expected(PROMPTS[0], 13)
    for count in range(1, 13):
        end = text.index(text[count - 1]) + 1 if stop else count
        params = replace(GREEDY, stop_token_ids=[text[count - 1]]) if stop else replace(GREEDY, max_tokens=count)
        collectors = [rig.submit(PROMPTS[0], params, stream=True), rig.submit(PROMPTS[2], GREEDY, stream=True)]
        rig.run()
        check_emitted(collectors[0], PROMPTS[0], end)
        check_emitted(collectors[1], PROMPTS[2], 12)
        assert collectors[0].output.finish_reason == ("stop" if stop else "length")
        # The last token's own entry is there if it was an accepted draft; what the text would go on with is not.
        longer = [*PROMPTS[0], *text]
        found = rig.generate(longer, GREEDY)
        known = len(PROMPTS[0]) + end
        assert (known - 1) // 4 * 4 <= found.cached_tokens <= known // 4 * 4
        assert found.token_ids == expected(longer, 12)
        rig.check_idle()
    assert rig.scheduler.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("draft_len", [1, 2, 3])
def test_a_preemption_at_any_step_emits_every_token_once(draft_len: int) -> None:
    """A later request that grows beside a more urgent one must give its pages up at some step."""
    num_preemptions = []
    for delay in range(16):
        rig = make_rig(num_slots=11, max_tokens_per_step=6, max_model_len=40, overlap=True, draft_len=draft_len)
        urgent = rig.submit([20, 21, 22], replace(GREEDY, max_tokens=30), stream=True)
        for _ in range(delay):
            rig.engine.step()
        prompt = [30 + i for i in range(10)]
        victim = rig.submit(prompt, replace(GREEDY, max_tokens=16, priority=1), stream=True)
        rig.run()
        check_emitted(urgent, [20, 21, 22], 30)
        check_emitted(victim, prompt, 16)
        assert urgent.output.num_preemptions == 0
        num_preemptions.append(victim.output.num_preemptions)
        rig.check_idle()
    assert sum(num_preemptions) > 3
