"""The window of step records: bounded, drained exactly once, and honest about what it dropped."""

import json
import random
import threading

import pytest

from tandem.serve.steps import DEFAULT_CAPACITY, StepRecord, StepWindow


def record(step_id: int) -> StepRecord:
    return StepRecord(
        step_id=step_id,
        time=1.5 * step_id,
        num_context_rows=1,
        num_decode_rows=2,
        num_tokens=9,
        num_generated=5,
        num_drafted=6,
        num_accepted=3,
        plan_s=0.001,
        launch_s=0.002,
        wait_s=0.003,
    )


def test_reading_changes_nothing_and_draining_forgets() -> None:
    window = StepWindow(capacity=3)
    for step_id in range(5):
        window.add(record(step_id))
    for _ in range(2):
        read = window.read()
        assert ([r.step_id for r in read.records], read.num_dropped, read.num_recorded) == ([2, 3, 4], 2, 5)
    assert window.drain() == read
    emptied = window.read()
    assert (emptied.records, emptied.num_dropped, emptied.num_recorded) == ([], 0, 5)
    window.add(record(5))
    assert [r.step_id for r in window.drain().records] == [5]


@pytest.mark.parametrize("capacity", [1, 2, 7])
def test_every_record_is_drained_or_dropped_once(capacity: int, py_rng: random.Random) -> None:
    window, drained, dropped, added = StepWindow(capacity), list[int](), 0, 0
    for _ in range(2000):
        if py_rng.random() < 0.8:
            window.add(record(added))
            added += 1
        elif py_rng.random() < 0.5:
            taken = window.drain()
            drained += [r.step_id for r in taken.records]
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
            mine.extend((r.step_id, 0) for r in got.records)
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
    assert values["records"][0]["step_id"] == 7
    assert values["records"][0]["failed"] is False
    assert (values["num_dropped"], values["num_recorded"]) == (0, 1)


def test_a_window_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity=0"):
        StepWindow(0)
    assert DEFAULT_CAPACITY == 5000
