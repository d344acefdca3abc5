import gc
import threading

import numpy as np
import pytest

from tandem.core import InvalidArgument, sched

NONE = np.zeros(0, dtype=np.int32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def config(**changes) -> sched.SchedulerConfig:
    fields = {
        "num_slots": 64,
        "tokens_per_page": 4,
        "max_seats": 4,
        "max_tokens_per_step": 16,
        "max_model_len": 128,
        "draft_len": 3,
        "has_drafter": True,
    }
    return sched.SchedulerConfig(**(fields | changes))


def spec(length: int, max_tokens: int = 8, **options) -> sched.RequestSpec:
    return sched.RequestSpec(np.arange(length, dtype=np.int32), max_tokens=max_tokens, **options)


ROW_ARRAYS = {
    "seq_id": np.int64,
    "epoch": np.int32,
    "seat": np.int32,
    "kind": np.int32,
    "first_index": np.int32,
    "query_len": np.int32,
    "write_from": np.int32,
    "num_drafts": np.int32,
    "max_length": np.int32,
    "samples": np.uint8,
    "proposes": np.uint8,
    "fresh": np.uint8,
}


def test_a_plan_shows_its_rows_as_read_only_arrays_of_the_stated_types():
    scheduler = sched.Scheduler(config())
    for length in (5, 6):
        scheduler.submit(spec(length))
    plan = scheduler.plan()
    assert (plan.step_id, plan.num_rows, plan.num_sampling_rows, plan.num_tokens) == (0, 2, 2, 11)
    assert plan.proposes.tolist() == [1, 1]
    for name, dtype in ROW_ARRAYS.items():
        array = getattr(plan, name)
        assert array.dtype == dtype
        assert array.shape == (2,)
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert plan.token_offsets.tolist() == [0, 6, 13]
    assert plan.token_ids.tolist() == [0, 1, 2, 3, 4, -1, 0, 1, 2, 3, 4, 5, -1]
    assert plan.table_changes.shape[1] == 3
    assert plan.table_changes.dtype == np.int32
    assert not plan.table_changes.flags.writeable
    # Known, the first row's reach behind it, and one more round planned ahead: 5 + 7 + 4 tokens, 13 at most.
    assert plan.table_changes[plan.table_changes[:, 0] == plan.seat[0]][:, 1].tolist() == [0, 1, 2, 3]


def test_a_plans_arrays_are_views_of_one_memory_that_other_steps_leave_alone():
    scheduler = sched.Scheduler(config())
    scheduler.submit(spec(21))
    first = scheduler.plan()
    ids, offsets, table = first.token_ids, first.token_offsets, first.table_changes
    assert np.shares_memory(ids, first.token_ids)
    before = [ids.copy(), offsets.copy(), table.copy()]
    second = scheduler.plan()
    assert not np.shares_memory(second.token_ids, ids)
    assert second.first_index.tolist() == [16]
    for array, copy in zip((ids, offsets, table), before, strict=True):
        np.testing.assert_array_equal(array, copy)
    scheduler.complete(sched.StepResult(first.step_id, NONE, NONE, NONE, NONE))
    third = scheduler.plan()
    assert third.first_index.tolist() == [21]
    np.testing.assert_array_equal(second.token_ids, [16, 17, 18, 19, 20, -1])


@pytest.mark.parametrize("end", ["complete", "fail"])
def test_a_plan_is_refused_once_its_step_is_over(end):
    scheduler = sched.Scheduler(config())
    scheduler.submit(spec(5))
    plan = scheduler.plan()
    if end == "complete":
        scheduler.complete(sched.StepResult(0, ints(1), ints(0), ints(7), ints(0)))
    else:
        scheduler.fail(0)
    assert plan.step_id == 0
    for name in (*ROW_ARRAYS, "token_ids", "token_offsets", "table_changes", "num_rows"):
        with pytest.raises(InvalidArgument, match="step 0 has completed"):
            getattr(plan, name)


def test_arrays_keep_the_scheduler_alive():
    scheduler = sched.Scheduler(config())
    scheduler.submit(spec(9))
    ids = scheduler.plan().token_ids
    events = None
    del scheduler
    gc.collect()
    assert ids.tolist() == [*range(9), -1]
    other = sched.Scheduler(config())
    other.submit(spec(4))
    other.plan()
    events = other.complete(sched.StepResult(0, ints(1), ints(0), ints(7), ints(0))).num_tokens
    del other
    gc.collect()
    assert events.tolist() == [1]


def test_a_request_runs_from_prompt_to_its_terminal_event():
    scheduler = sched.Scheduler(config(overlap=False))
    seq_id = scheduler.submit(spec(6, max_tokens=5))
    scheduler.plan()
    scheduler.complete(sched.StepResult(0, ints(1), ints(0), ints(40), ints(0)))
    plan = scheduler.plan()
    assert plan.kind.tolist() == [sched.RowKind.DECODE]
    assert plan.num_drafts.tolist() == [3]
    events = scheduler.complete(sched.StepResult(1, ints(3), ints(2), ints(41, 42, 43), ints(0)))
    assert events.step_id == 1
    assert [a.tolist() for a in (events.seq_id, events.valid, events.num_tokens, events.num_accepted)] == [
        [seq_id],
        [1],
        [3],
        [2],
    ]
    assert not events.num_tokens.flags.writeable
    assert events.terminals == []
    known = scheduler.known_tokens(seq_id)
    assert known.tolist() == [0, 1, 2, 3, 4, 5, 40, 41, 42, 43]
    assert known.flags.writeable  # a copy
    scheduler.plan()
    events = scheduler.complete(sched.StepResult(2, ints(4), ints(3), ints(44, 45, 46, 47), ints(0)))
    assert events.num_tokens.tolist() == [1]
    assert events.finish.tolist() == [sched.FinishReason.LENGTH]
    (terminal,) = events.terminals
    assert (terminal.seq_id, terminal.reason) == (seq_id, sched.FinishReason.LENGTH)
    assert (terminal.num_prompt_tokens, terminal.num_generated_tokens, terminal.num_cached_tokens) == (6, 5, 0)
    assert terminal.num_preemptions == 0
    assert scheduler.plan() is None
    assert scheduler.num_unfinished == 0


def test_events_are_refused_after_the_next_ones():
    scheduler = sched.Scheduler(config())
    scheduler.submit(spec(5))
    scheduler.plan()
    scheduler.plan()
    first = scheduler.complete(sched.StepResult(0, ints(1), ints(0), ints(7), ints(0)))
    scheduler.complete(sched.StepResult(1, ints(1), ints(0), ints(8), ints(0)))
    with pytest.raises(InvalidArgument, match="step 0 are gone"):
        first.num_tokens  # noqa: B018


def test_abort_returns_the_terminal_event_once():
    scheduler = sched.Scheduler(config())
    seq_id = scheduler.submit(spec(5))
    scheduler.plan()
    terminal = scheduler.abort(seq_id)
    assert terminal.reason == sched.FinishReason.ABORT
    assert scheduler.abort(seq_id) is None
    events = scheduler.complete(sched.StepResult(0, ints(1), ints(0), ints(7), ints(0)))
    assert events.valid.tolist() == [0]
    assert events.terminals == []
    with pytest.raises(InvalidArgument, match="no request has id 5"):
        scheduler.abort(5)


def test_a_failed_step_ends_its_requests_with_error():
    scheduler = sched.Scheduler(config())
    seq_id = scheduler.submit(spec(5))
    plan = scheduler.plan()
    events = scheduler.fail(plan.step_id)
    assert [(t.seq_id, t.reason) for t in events.terminals] == [(seq_id, sched.FinishReason.ERROR)]
    assert events.num_tokens.shape == (0,)
    assert scheduler.stats().num_finished[sched.FinishReason.ERROR] == 1
    assert scheduler.stats().num_failed_steps == 1


def test_statistics_and_ledger_count_what_happened():
    scheduler = sched.Scheduler(config(overlap=False))
    for _ in range(2):
        scheduler.submit(spec(9, max_tokens=1))
        plan = scheduler.plan()
        scheduler.complete(sched.StepResult(plan.step_id, ints(1), ints(0), ints(7), ints(0)))
    stats = scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_generated_tokens) == (18, 8, 2)
    assert (stats.num_planned_steps, stats.num_completed_steps, stats.num_context_rows) == (2, 2, 2)
    assert stats.num_context_tokens == 9 + 2  # the second time one cached token runs again, and one more
    assert (stats.num_running, stats.num_waiting, stats.num_steps_in_flight, stats.num_pending_pages) == (0, 0, 0, 0)
    ledger = scheduler.ledger()
    assert (ledger.free, ledger.cached, ledger.held, ledger.leased, ledger.total) == (62, 2, 0, 0, 64)
    scheduler.reset_prefix_cache()
    assert scheduler.ledger().free == 64
    scheduler.check()


def test_another_thread_is_refused_until_it_is_bound():
    scheduler = sched.Scheduler(config())
    scheduler.submit(spec(5))
    outcome: list[object] = []

    def call() -> None:
        try:
            scheduler.plan()
        except InvalidArgument as error:
            outcome.append(str(error))
        scheduler.bind_thread()
        outcome.append(scheduler.plan().num_rows)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "another thread" in outcome[0]
    assert outcome[1] == 1
    with pytest.raises(InvalidArgument, match="another thread"):
        scheduler.stats()


def test_a_plan_may_be_read_by_the_thread_that_runs_the_step():
    scheduler = sched.Scheduler(config())
    scheduler.submit(spec(5))
    plan = scheduler.plan()
    seen: list[list[int]] = []
    thread = threading.Thread(target=lambda: seen.append(plan.token_ids.tolist()))
    thread.start()
    thread.join()
    assert seen == [[0, 1, 2, 3, 4, -1]]


def test_mistakes_are_value_errors_that_name_the_numbers():
    assert issubclass(InvalidArgument, ValueError)
    with pytest.raises(InvalidArgument, match="draft_len is 9"):
        config(draft_len=9)
    scheduler = sched.Scheduler(config(num_slots=8))
    with pytest.raises(InvalidArgument, match="33 together, need 9 pages, the pool has 8"):
        scheduler.submit(spec(25, max_tokens=8))
    with pytest.raises(InvalidArgument, match="130 tokens, at most max_model_len - 1 = 127"):
        scheduler.submit(spec(130))
    assert scheduler.config.max_sequence_tokens == 32
    scheduler.submit(spec(5))
    scheduler.plan()
    scheduler.plan()
    with pytest.raises(InvalidArgument, match="2 steps are in flight"):
        scheduler.plan()
    with pytest.raises(InvalidArgument, match="got step 1, step 0 is next"):
        scheduler.complete(sched.StepResult(1, ints(1), ints(0), ints(7), ints(0)))
    with pytest.raises(InvalidArgument, match="has 1 sampling rows, got 2 num_tokens"):
        scheduler.complete(sched.StepResult(0, ints(1, 1), ints(0, 0), ints(7, 7), ints(0, 0)))


@pytest.mark.parametrize(
    "prompt",
    [np.arange(4), np.arange(4, dtype=np.float32), np.arange(8, dtype=np.int32)[::2], np.zeros((2, 2), np.int32), [1]],
    ids=["int64", "float32", "strided", "two axes", "list"],
)
def test_a_prompt_of_another_form_is_refused_and_not_converted(prompt):
    with pytest.raises(TypeError):
        sched.RequestSpec(prompt, max_tokens=1)


def test_result_arrays_of_another_type_are_refused_and_not_converted():
    with pytest.raises(TypeError):
        sched.StepResult(0, np.ones(1), ints(0), ints(7), ints(0))
    with pytest.raises(TypeError):
        sched.StepResult(0, ints(1), ints(0), np.ones(1, dtype=np.int64), ints(0))


def test_a_prompt_is_copied_at_submit():
    scheduler = sched.Scheduler(config())
    prompt = np.arange(5, dtype=np.int32)
    seq_id = scheduler.submit(sched.RequestSpec(prompt, max_tokens=3))
    prompt[:] = 50
    assert scheduler.known_tokens(seq_id).tolist() == [0, 1, 2, 3, 4]
    assert scheduler.num_cached(seq_id) == 0
