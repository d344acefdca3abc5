"""Pages, handles, the prefix tree and sequence pages as Python sees them."""

import gc
import random
import subprocess
import sys
import textwrap

import pytest

from tandem.core import InvalidArgument, kv


def take(pool: kv.PagePool, n: int) -> list[kv.PageRef]:
    pages = [pool.allocate() for _ in range(n)]
    return [page for page in pages if page is not None]


def test_pages_run_out_as_an_ordinary_answer() -> None:
    pool = kv.PagePool(2)
    pages = take(pool, 2)
    assert len(pages) == 2
    assert pool.allocate() is None
    pages.pop().release()
    assert pool.allocate() is not None


def test_a_handle_is_released_once_and_says_so_afterwards() -> None:
    pool = kv.PagePool(1)
    [page] = take(pool, 1)
    assert page
    assert page.slot == 0
    page.release()
    page.release()
    assert not page
    assert pool.num_free == 1
    assert repr(page) == "PageRef(released)"
    for use in (lambda: page.slot, lambda: page.holder, page.share, lambda: page.retag(kv.Holder.STEP)):
        with pytest.raises(InvalidArgument, match="was released"):
            use()


def test_a_handle_is_a_context() -> None:
    pool = kv.PagePool(1)
    [page] = take(pool, 1)
    with page as same:
        assert same is page
        assert pool.num_free == 0
    assert pool.num_free == 1


def test_a_handle_that_python_forgets_frees_its_slot() -> None:
    pool = kv.PagePool(1)
    page = pool.allocate()
    assert pool.num_free == 0
    del page
    gc.collect()
    assert pool.num_free == 1


def test_handles_keep_their_pool_alive() -> None:
    # A pool that dies before its handles ends the process.
    page = kv.PagePool(1).allocate()
    gc.collect()
    assert page is not None
    other = page.share()
    page.release()
    assert other.slot == 0


def test_states_follow_from_who_holds_the_page() -> None:
    pool = kv.PagePool(1)
    tree = kv.PrefixTree(pool, 2)
    [sequence] = take(pool, 1)
    lease = sequence.share(kv.Holder.LEASE)
    assert pool.state(0) == kv.PageState.HELD
    tree.insert([5, 6], [sequence])
    sequence.retag(kv.Holder.STEP)
    assert pool.state(0) == kv.PageState.HELD
    assert pool.num_handles(0, kv.Holder.SEQUENCE) == 0
    assert pool.num_pending == 0
    lease.release()
    assert pool.num_pending == 1
    lease = sequence.share(kv.Holder.LEASE)
    sequence.release()
    assert pool.state(0) == kv.PageState.LEASED
    lease.release()
    assert pool.state(0) == kv.PageState.CACHED
    assert tree.contains(0)
    assert tree.evict(5) == 1
    assert pool.state(0) == kv.PageState.FREE
    with pytest.raises(InvalidArgument, match="slot is 1, must be from 0 to 0"):
        pool.state(1)


def test_only_the_tree_makes_the_trees_handles() -> None:
    pool = kv.PagePool(1)
    with pytest.raises(InvalidArgument, match="the tree makes its own handles"):
        pool.allocate(kv.Holder.TREE)
    [page] = take(pool, 1)
    for use in (lambda: page.share(kv.Holder.TREE), lambda: page.retag(kv.Holder.TREE)):
        with pytest.raises(InvalidArgument, match="the tree makes its own handles"):
            use()


def test_a_match_covers_whole_pages_of_its_own_salt() -> None:
    pool = kv.PagePool(8)
    tree = kv.PrefixTree(pool, 4)
    assert tree.insert(list(range(11)), take(pool, 2), salt="x") == 2
    assert [page.slot for page in tree.match(list(range(11)), salt="x")] == [0, 1]
    assert len(tree.match(list(range(7)), salt="x")) == 1
    assert tree.match(list(range(11)), salt="y") == []
    assert tree.match(list(range(11))) == []
    with pytest.raises(InvalidArgument, match="a negative token id among tokens 4 to 7"):
        tree.match([1, 2, 3, 4, 5, -1, 7, 8])
    with pytest.raises(InvalidArgument, match="1 pages for the 2 full pages of 9 tokens"):
        tree.insert(list(range(100, 109)), take(pool, 1))


def test_a_pool_has_one_tree() -> None:
    pool = kv.PagePool(1)
    tree = kv.PrefixTree(pool, 1)
    with pytest.raises(InvalidArgument, match="has a prefix tree already"):
        kv.PrefixTree(pool, 1)
    assert tree.num_pages == 0


def test_a_sequence_grows_commits_and_comes_back_as_a_hit() -> None:
    pool = kv.PagePool(6)
    tree = kv.PrefixTree(pool, 4)
    tokens = list(range(10))
    sequence = kv.SequencePages(pool, tree, 4)
    assert sequence.attach_prefix(tokens) == 0
    assert sequence.grow(11)
    sequence.set_computed(10)
    sequence.commit(tokens)
    assert (sequence.committed, sequence.computed, sequence.capacity) == (8, 10, 12)
    assert not sequence.grow(25)
    assert sequence.slots == [0, 1, 2]
    in_flight = sequence.release_to_step()
    assert [page.holder for page in in_flight] == [kv.Holder.STEP] * 3
    assert pool.num_pending == 3
    assert sequence.probe_prefix(tokens) == 8
    assert sequence.attach_prefix(tokens) == 8
    del in_flight
    assert pool.ledger().held == 2
    sequence.release()
    assert (pool.ledger().free, pool.ledger().cached, tree.num_evictable) == (4, 2, 2)


def test_misuse_of_a_sequence_is_refused_with_the_values() -> None:
    pool = kv.PagePool(4)
    tree = kv.PrefixTree(pool, 4)
    with pytest.raises(InvalidArgument, match="tokens_per_page is 8, the tree's is 4"):
        kv.SequencePages(pool, tree, 8)
    sequence = kv.SequencePages(pool, tree, 4)
    assert sequence.grow(8)
    with pytest.raises(InvalidArgument, match=r"computed is 9, must be from 0 .* to 8"):
        sequence.set_computed(9)
    sequence.set_computed(5)
    with pytest.raises(InvalidArgument, match="given 4 tokens, needs the 5 computed ones"):
        sequence.commit([1, 2, 3, 4])
    with pytest.raises(InvalidArgument, match="this one has 2 pages"):
        sequence.attach_prefix([1, 2, 3, 4])


def test_any_mix_of_operations_leaves_every_page_free_or_cached_when_idle(py_rng: random.Random) -> None:
    pool = kv.PagePool(10)
    tree = kv.PrefixTree(pool, 2)
    running: list[tuple[kv.SequencePages, list[int]]] = []
    in_flight: list[list[kv.PageRef]] = []
    hits = refused = 0
    for _ in range(2000):
        action = py_rng.randrange(4)
        if action == 0 and len(running) < 4:
            tokens = [py_rng.randrange(2) for _ in range(py_rng.randrange(1, 12))]
            sequence = kv.SequencePages(pool, tree, 2)
            hits += sequence.attach_prefix(tokens)
            running.append((sequence, tokens))
        elif action == 1 and running:
            sequence, tokens = py_rng.choice(running)
            if sequence.grow(sequence.computed + py_rng.randrange(4)):
                sequence.set_computed(sequence.capacity)
                tokens += [py_rng.randrange(2) for _ in range(sequence.computed - len(tokens))]
                sequence.commit(tokens)
            else:
                refused += 1
        elif action == 2 and running:
            sequence, tokens = running.pop(py_rng.randrange(len(running)))
            sequence.enter_all(tokens)
            if py_rng.random() < 0.5:
                in_flight.append(sequence.release_to_step())
            else:
                sequence.release()
        elif action == 3 and in_flight:
            in_flight.pop(0)
        ledger = pool.ledger()
        assert ledger.free + ledger.cached + ledger.held + ledger.leased == ledger.total
        assert ledger.free == pool.num_free
        pool.check()
        tree.check()
    assert hits > 20
    assert refused > 0
    for sequence, _ in running:
        sequence.release()
    in_flight.clear()
    ledger = pool.ledger()
    assert ledger.free + ledger.cached == ledger.total
    assert tree.num_evictable == ledger.cached
    tree.clear()
    assert pool.ledger().free == pool.num_slots


def test_a_process_that_ends_with_everything_alive_ends_cleanly() -> None:
    script = textwrap.dedent(
        """
        from tandem.core import kv
        pool = kv.PagePool(4)
        tree = kv.PrefixTree(pool, 1)
        sequence = kv.SequencePages(pool, tree, 1)
        assert sequence.grow(2)
        sequence.set_computed(2)
        sequence.commit([1, 2])
        pages = tree.match([1, 2]) + [pool.allocate()]
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
