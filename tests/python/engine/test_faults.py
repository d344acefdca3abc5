"""A fault at any place of any step fails the rows of that step, or stops the engine, and leaves nothing behind."""

import pytest

from tandem.engine.params import SamplingParams
from tests.python.engine.scripted import expected, make_rig

PROMPT = [100 + 7 * i % 150 for i in range(24)]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.mark.parametrize("draft_len", [None, 3])
@pytest.mark.parametrize("place", ["before", "half_way"])
def test_chunks_launched_behind_one_that_failed_write_to_nobodys_pages(place: str, draft_len: int | None) -> None:
    """The seat's table is still that of its last owner, whose pages are in the prefix cache."""
    rig = make_rig(overlap=True, max_tokens_per_step=4, draft_len=draft_len)
    rig.generate(PROMPT, GREEDY)
    before = rig.scheduler.stats()
    getattr(rig.faults, place).add(before.num_planned_steps)
    other = [token + 1 for token in PROMPT]
    assert rig.generate(other, GREEDY).finish_reason == "error"
    assert rig.scheduler.stats().num_dropped_rows == before.num_dropped_rows + 1
    again = rig.generate(PROMPT, GREEDY)
    assert (again.cached_tokens, again.token_ids) == (24, expected(PROMPT, 8))
    assert rig.generate(other, GREEDY).token_ids == expected(other, 8)
    rig.check_idle()
