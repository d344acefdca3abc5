"""The window of step records: bounded, drained exactly once, and honest about what it dropped."""

import json
import random
import threading

import pytest

from tandem.engine.engine import EngineCounters, EngineStats
from tandem.engine.params import SamplingParams
from tandem.serve.steps import DEFAULT_CAPACITY, StepRecord, StepRecorder, StepWindow
from tests.python.engine.scripted import make_rig


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        time=1.5 * step,
        num_context_rows=1,
        num_decode_rows=2,
        num_tokens=9,
        num_generated=5,
        num_drafted=6,
        num_accepted=3,
        num_running=2,
        num_waiting=0,
        plan_s=0.001,
        launch_s=0.002,
        wait_s=0.003,
        output_s=0.004,
    )


def test_reading_changes_nothing_and_draining_forgets() -> None:
    window = StepWindow(capacity=3)
    for step_id in range(5):
        window.add(record(step_id))
    for _ in range(2):
        read = window.read()
        assert ([r.step for r in read.records], read.num_dropped, read.num_recorded) == ([2, 3, 4], 2, 5)
    assert window.drain() == read
    emptied = window.read()
    assert (emptied.records, emptied.num_dropped, emptied.num_recorded) == ([], 0, 5)
    window.add(record(5))
    assert [r.step for r in window.drain().records] == [5]


@pytest.mark.parametrize("capacity", [1, 2, 7])
def test_every_record_is_drained_or_dropped_once(capacity: int, py_rng: random.Random) -> None:
    window, drained, dropped, added = StepWindow(capacity), list[int](), 0, 0
    for _ in range(2000):
        if py_rng.random() < 0.8:
            window.add(record(added))
            added += 1
        elif py_rng.random() < 0.5:
            taken = window.drain()
            drained += [r.step for r in taken.records]
            dropped += taken.num_dropped
        read = window.read()
        assert len(read.records) <= capacity
        assert read.num_recorded == added == len(drained) + dropped + len(read.records) + read.num_dropped
    assert drained == sorted(set(drained))


def test_drains_beside_a_writer_lose_and_repeat_nothing() -> None:
    window, total = StepWindow(capacity=50), 20_000
    writer = threading.Thread(target=lambda: [window.add(record(i)) for i in range(total)])
    taken: list[list[tuple[int, int]]] = [[], []]

    def drain(mine: list[tuple[int, int]]) -> None:
        alive = True
        while alive:
            alive = writer.is_alive()
            got = window.drain()
            mine.extend((r.step, 0) for r in got.records)
            mine.append((-1, got.num_dropped))

    readers = [threading.Thread(target=drain, args=(mine,)) for mine in taken]
    for thread in (writer, *readers):
        thread.start()
    for thread in (writer, *readers):
        thread.join()
    ids = [step_id for mine in taken for step_id, _ in mine if step_id >= 0]
    assert len(ids) == len(set(ids))
    assert len(ids) + sum(dropped for mine in taken for _, dropped in mine) == total


def test_a_window_is_plain_json() -> None:
    window = StepWindow(2)
    window.add(record(7))
    values = json.loads(json.dumps(window.read().to_dict()))
    assert values["records"][0]["step"] == 7
    assert values["records"][0]["failed"] is False
    assert (values["num_dropped"], values["num_recorded"]) == (0, 1)


def test_a_window_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity=0"):
        StepWindow(0)
    assert DEFAULT_CAPACITY == 5000


@pytest.mark.parametrize("overlap", [False, True])
def test_the_records_of_an_engine_add_up_to_its_counters(overlap: bool) -> None:
    rig = make_rig(draft_len=2, overlap=overlap, max_seats=2)
    params = SamplingParams(temperature=0, max_tokens=12)
    rig.generate(list(range(10, 15)), params)
    window, start = StepWindow(), rig.engine.stats()
    rig.engine.observe_steps(StepRecorder(window, start))
    outputs = [rig.submit(list(range(20 + 7 * i, 26 + 8 * i)), params) for i in range(3)]
    rig.run()
    end = rig.engine.stats()
    records = window.read().records
    assert [r.step for r in records] == list(range(start.num_steps + 1, end.num_steps + 1))
    for field in ("context_rows", "decode_rows"):
        grown = getattr(end.scheduler, f"num_{field}") - getattr(start.scheduler, f"num_{field}")
        assert sum(getattr(r, f"num_{field}") for r in records) == grown > 0
    assert sum(r.num_generated for r in records) == sum(len(each.output.token_ids) for each in outputs) == 36
    assert sum(r.num_accepted for r in records) <= sum(r.num_drafted for r in records)
    assert sum(r.num_drafted for r in records) == sum(each.output.rounds.num_drafted for each in outputs) > 0
    assert max(r.num_running for r in records) == 2
    assert records[0].num_waiting == 1
    for part in ("launch", "wait", "output"):
        taken = getattr(end.times, part) - getattr(start.times, part)
        assert sum(getattr(r, f"{part}_s") for r in records) == pytest.approx(taken)
        assert taken > 0
    # The plan that found nothing left to do belongs to no step.
    assert 0 < sum(r.plan_s for r in records) < end.times.plan - start.times.plan
    assert not any(r.failed for r in records)
    rig.engine.observe_steps(None)
    rig.generate(list(range(10, 15)), params)
    assert window.read().num_recorded == len(records)


def test_what_is_observed_in_each_step_looks_at_no_page_of_the_pool() -> None:
    """The state of every page costs more the larger the pool is; a step must not."""
    rig = make_rig()
    seen: list[EngineCounters] = []
    rig.engine.observe_steps(seen.append)
    rig.generate(list(range(10, 15)), SamplingParams(temperature=0, max_tokens=4))
    assert seen
    assert not any(isinstance(each, EngineStats) for each in seen)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_is_a_record_as_well(overlap: bool) -> None:
    rig = make_rig(overlap=overlap)
    window = StepWindow()
    rig.engine.observe_steps(StepRecorder(window, rig.engine.stats()))

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    rig.model.before_forward = fail
    rig.submit(list(range(10, 15)), SamplingParams(temperature=0, max_tokens=4))
    rig.run()
    assert [r.failed for r in window.read().records][:1] == [True]
    assert len(window.read().records) == rig.engine.num_steps
