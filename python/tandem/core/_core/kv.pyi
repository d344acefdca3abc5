"""Page pool, prefix tree and sequence pages."""

from collections.abc import Sequence
import enum


class Holder(enum.Enum):
    """Who holds a page."""

    SEQUENCE = 0
    """The table of a running sequence."""

    STEP = 1
    """A step in flight whose table named the page."""

    LEASE = 2
    """A peer that may read the page."""

    TREE = 3
    """The prefix tree."""

class PageState(enum.Enum):
    """What a slot is; follows from its handles."""

    FREE = 0
    """No handle."""

    CACHED = 1
    """Only the tree's handle."""

    HELD = 2
    """A handle of a sequence or a step."""

    LEASED = 3
    """A handle of a lease, none of a sequence or step."""

class Ledger:
    """Slots by state. free + cached + held + leased = total."""

    @property
    def free(self) -> int:
        """Slots without a handle."""

    @property
    def cached(self) -> int:
        """Slots that only the tree holds."""

    @property
    def held(self) -> int:
        """Slots that a sequence or step holds."""

    @property
    def leased(self) -> int:
        """Slots that a lease holds and no sequence or step does."""

    @property
    def total(self) -> int:
        """All slots."""

    def __eq__(self, other: object, /) -> bool: ...

    def __repr__(self) -> str: ...

class PageRef:
    """
    A handle of one page: the only way to keep it. The last handle released frees the slot. Also a context manager, which releases at its end.
    """

    @property
    def slot(self) -> int:
        """The slot. Raises InvalidArgument once released."""

    @property
    def holder(self) -> Holder:
        """Whom it is for. Raises InvalidArgument once released."""

    def share(self, holder: Holder = Holder.SEQUENCE) -> PageRef:
        """Another handle of the same page."""

    def retag(self, holder: Holder) -> None:
        """Makes this handle another holder's."""

    def release(self) -> None:
        """Drops the handle. Releasing again does nothing."""

    def __bool__(self) -> bool: ...

    def __enter__(self) -> PageRef: ...

    def __exit__(self, *args: object) -> None: ...

    def __repr__(self) -> str: ...

class PagePool:
    """
    The slots of one cache and who holds them. Knows no bytes. Used by one thread.
    """

    def __init__(self, num_slots: int) -> None:
        """Raises InvalidArgument unless num_slots >= 1."""

    def allocate(self, holder: Holder = Holder.SEQUENCE) -> PageRef | None:
        """A handle of a free page, or None when there is none."""

    @property
    def num_slots(self) -> int:
        """All slots."""

    @property
    def num_free(self) -> int:
        """Slots that can be allocated now."""

    @property
    def num_pending(self) -> int:
        """Pages that only steps in flight (and perhaps the tree) hold."""

    def state(self, slot: int) -> PageState:
        """State of a slot. Raises InvalidArgument for a slot outside the pool."""

    def num_handles(self, slot: int, holder: Holder) -> int:
        """
        Handles of one kind on a slot. Raises InvalidArgument for a slot outside the pool.
        """

    def ledger(self) -> Ledger:
        """Counts every slot's state from its handles; O(num_slots)."""

    def check(self) -> None:
        """Aborts the process if the pool contradicts itself; O(num_slots)."""

class PrefixTree:
    """
    A radix tree of whole pages, keyed by (parent page, tokens, namespace salt). Tokens are compared, not only hashed. One per pool.
    """

    def __init__(self, pool: PagePool, tokens_per_page: int) -> None:
        """
        Raises InvalidArgument unless tokens_per_page >= 1, and for a pool that has a tree.
        """

    def match(self, tokens: Sequence[int], salt: str = '', holder: Holder = Holder.SEQUENCE) -> list[PageRef]:
        """
        Pinned handles of the longest run of whole cached pages that `tokens` starts with under `salt`.
        """

    def insert(self, tokens: Sequence[int], pages: Sequence[PageRef], salt: str = '') -> int:
        """
        Enters the full pages of `tokens`, held by `pages` in order, where the tree lacks them; returns how many entered. Raises InvalidArgument for fewer pages than needed, a negative token, or a page of another pool or of another prefix.
        """

    def evict(self, num_pages: int) -> int:
        """
        Frees up to `num_pages` pages that nobody else holds, the least recently used leaf first; returns how many.
        """

    def clear(self) -> None:
        """Forgets every page; those that others hold live on with them."""

    @property
    def tokens_per_page(self) -> int:
        """Tokens of one page."""

    @property
    def num_pages(self) -> int:
        """Pages in the tree."""

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` can free now."""

    def contains(self, slot: int) -> bool:
        """
        Whether the tree has this slot's page. Raises InvalidArgument for a slot outside the pool.
        """

    def check(self) -> None:
        """
        Aborts the process if the tree contradicts itself or the pool; O(num_slots).
        """

class SequencePages:
    """
    The pages of one sequence and how far they are filled, in tokens: committed (full pages offered to the tree) <= computed (entries written) <= capacity (pages held).
    """

    def __init__(self, pool: PagePool, tree: PrefixTree | None, tokens_per_page: int, salt: str = '') -> None:
        """
        `tree` is None where prefixes are not cached. Raises InvalidArgument unless tokens_per_page >= 1 and equals the tree's.
        """

    def attach_prefix(self, tokens: Sequence[int]) -> int:
        """
        Takes the longest cached prefix of `tokens` as the first pages; returns its length in tokens. Raises InvalidArgument unless the sequence is empty.
        """

    def probe_prefix(self, tokens: Sequence[int]) -> int:
        """What `attach_prefix` would return, without pinning anything."""

    def grow(self, num_tokens: int) -> bool:
        """
        Makes room for `num_tokens` tokens in all, evicting if needed. All or nothing: False changes nothing.
        """

    def pages_to_grow(self, num_tokens: int) -> int:
        """Pages that `grow` would have to obtain."""

    def set_computed(self, num_tokens: int) -> None:
        """
        A completed step wrote the entries below. Raises InvalidArgument below the value so far or above capacity.
        """

    def commit(self, tokens: Sequence[int]) -> None:
        """
        Offers every full page below `computed` to the tree. Raises InvalidArgument for too few tokens.
        """

    def enter_all(self, tokens: Sequence[int]) -> None:
        """
        Enters committed pages that wait behind the tree's copies. To be called right before a release.
        """

    def release(self) -> None:
        """Drops every page."""

    def release_to_step(self) -> list[PageRef]:
        """
        Hands every page to a step in flight that still uses it: returns their handles, now STEP's.
        """

    @property
    def committed(self) -> int:
        """Tokens of full pages offered to the tree."""

    @property
    def computed(self) -> int:
        """Tokens whose entries completed steps have written."""

    @property
    def capacity(self) -> int:
        """Tokens that the pages held have room for."""

    @property
    def slots(self) -> list[int]:
        """Slots of the pages, in token order."""
