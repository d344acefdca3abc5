#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "tandem/base/check.h"
#include "tandem/kv/page_pool.h"
#include "tandem/kv/prefix_tree.h"
#include "tandem/kv/sequence_pages.h"

using namespace nb::literals;

namespace tandem::kv {
namespace {

// A handle as Python holds it. It keeps the pool's object alive; members die last to first, so the page goes first.
struct Handle {
  nb::object pool;
  PageRef page;
};

const PageRef& held(const Handle& handle) {
  if (!handle.page) {
    throw InvalidArgument("this page handle was released and holds nothing");
  }
  return handle.page;
}

Holder outside_tree(Holder holder) {
  if (holder == Holder::Tree) {
    throw InvalidArgument("holder is TREE, must be SEQUENCE, STEP or LEASE: the tree makes its own handles");
  }
  return holder;
}

Handle handle_of(const PagePool& pool, PageRef page) { return Handle{nb::find(pool), std::move(page)}; }

std::vector<Handle> handles_of(const PagePool& pool, std::vector<PageRef> pages) {
  std::vector<Handle> handles;
  handles.reserve(pages.size());
  for (PageRef& page : pages) {
    handles.push_back(handle_of(pool, std::move(page)));
  }
  return handles;
}

void bind_pool(nb::module_& m) {
  nb::enum_<Holder>(m, "Holder", "Who holds a page.")
      .value("SEQUENCE", Holder::Sequence, "The table of a running sequence.")
      .value("STEP", Holder::Step, "A step in flight whose table named the page.")
      .value("LEASE", Holder::Lease, "A peer that may read the page.")
      .value("TREE", Holder::Tree, "The prefix tree.");
  nb::enum_<PageState>(m, "PageState", "What a slot is; follows from its handles.")
      .value("FREE", PageState::Free, "No handle.")
      .value("CACHED", PageState::Cached, "Only the tree's handle.")
      .value("HELD", PageState::Held, "A handle of a sequence or a step.")
      .value("LEASED", PageState::Leased, "A handle of a lease, none of a sequence or step.");

  nb::class_<Ledger>(m, "Ledger", "Slots by state. free + cached + held + leased = total.")
      .def_ro("free", &Ledger::free, "Slots without a handle.")
      .def_ro("cached", &Ledger::cached, "Slots that only the tree holds.")
      .def_ro("held", &Ledger::held, "Slots that a sequence or step holds.")
      .def_ro("leased", &Ledger::leased, "Slots that a lease holds and no sequence or step does.")
      .def_ro("total", &Ledger::total, "All slots.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__repr__", [](const Ledger& l) {
        return "Ledger(free=" + std::to_string(l.free) + ", cached=" + std::to_string(l.cached) +
               ", held=" + std::to_string(l.held) + ", leased=" + std::to_string(l.leased) +
               ", total=" + std::to_string(l.total) + ")";
      });

  nb::class_<Handle>(m, "PageRef",
                     "A handle of one page: the only way to keep it. The last handle released frees the slot. Also a "
                     "context manager, which releases at its end.")
      .def_prop_ro(
          "slot", [](const Handle& h) { return held(h).slot().value(); },
          "The slot. Raises InvalidArgument once released.")
      .def_prop_ro(
          "holder", [](const Handle& h) { return held(h).holder(); },
          "Whom it is for. Raises InvalidArgument once released.")
      .def(
          "share", [](const Handle& h, Holder holder) { return Handle{h.pool, held(h).share(outside_tree(holder))}; },
          "holder"_a = Holder::Sequence, "Another handle of the same page.")
      .def(
          "retag",
          [](Handle& h, Holder holder) {
            (void)held(h);
            h.page.retag(outside_tree(holder));
          },
          "holder"_a, "Makes this handle another holder's.")
      .def(
          "release", [](Handle& h) { h.page.reset(); }, "Drops the handle. Releasing again does nothing.")
      .def("__bool__", [](const Handle& h) { return static_cast<bool>(h.page); })
      .def(
          "__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> PageRef"))
      .def(
          "__exit__", [](Handle& h, const nb::args&) { h.page.reset(); }, "args"_a,
          nb::sig("def __exit__(self, *args: object) -> None"))
      .def("__repr__", [](const Handle& h) {
        return h.page ? "PageRef(slot=" + std::to_string(h.page.slot().value()) + ")"
                      : std::string("PageRef(released)");
      });

  nb::class_<PagePool>(m, "PagePool", "The slots of one cache and who holds them. Knows no bytes. Used by one thread.",
                       nb::is_weak_referenceable())
      .def(nb::init<std::int32_t>(), "num_slots"_a, "Raises InvalidArgument unless num_slots >= 1.")
      .def(
          "allocate",
          [](PagePool& pool, Holder holder) -> std::optional<Handle> {
            std::optional<PageRef> page = pool.allocate(outside_tree(holder));
            return page ? std::optional(handle_of(pool, std::move(*page))) : std::nullopt;
          },
          "holder"_a = Holder::Sequence, "A handle of a free page, or None when there is none.")
      .def_prop_ro("num_slots", &PagePool::num_slots, "All slots.")
      .def_prop_ro("num_free", &PagePool::num_free, "Slots that can be allocated now.")
      .def_prop_ro("num_pending", &PagePool::num_pending,
                   "Pages that only steps in flight (and perhaps the tree) hold.")
      .def(
          "state", [](const PagePool& pool, std::int32_t slot) { return pool.state(SlotId{slot}); }, "slot"_a,
          "State of a slot. Raises InvalidArgument for a slot outside the pool.")
      .def(
          "num_handles",
          [](const PagePool& pool, std::int32_t slot, Holder holder) { return pool.num_handles(SlotId{slot}, holder); },
          "slot"_a, "holder"_a, "Handles of one kind on a slot. Raises InvalidArgument for a slot outside the pool.")
      .def("ledger", &PagePool::ledger, "Counts every slot's state from its handles; O(num_slots).")
      .def("check", &PagePool::check, "Aborts the process if the pool contradicts itself; O(num_slots).");
}

void bind_tree(nb::module_& m) {
  nb::class_<PrefixTree>(m, "PrefixTree",
                         "A radix tree of whole pages, keyed by (parent page, tokens, namespace salt). Tokens are "
                         "compared, not only hashed. One per pool.")
      .def(nb::init<PagePool&, std::int32_t>(), "pool"_a, "tokens_per_page"_a, nb::keep_alive<1, 2>(),
           "Raises InvalidArgument unless tokens_per_page >= 1, and for a pool that has a tree.")
      .def(
          "match",
          [](PrefixTree& tree, const std::vector<TokenId>& tokens, const std::string& salt, Holder holder) {
            return handles_of(tree.pool(), tree.match(tokens, salt, outside_tree(holder)));
          },
          "tokens"_a, "salt"_a = "", "holder"_a = Holder::Sequence,
          "Pinned handles of the longest run of whole cached pages that `tokens` starts with under `salt`.")
      .def(
          "insert",
          [](PrefixTree& tree, const std::vector<TokenId>& tokens, const std::vector<Handle*>& handles,
             const std::string& salt) {
            std::vector<PageRef> pages;
            for (const Handle* handle : handles) {
              pages.push_back(held(*handle).share(Holder::Sequence));
            }
            return tree.insert(tokens, pages, salt);
          },
          "tokens"_a, "pages"_a, "salt"_a = "",
          "Enters the full pages of `tokens`, held by `pages` in order, where the tree lacks them; returns how many "
          "entered. Raises InvalidArgument for fewer pages than needed, a negative token, or a page of another pool or "
          "of another prefix.")
      .def(
          "evict", &PrefixTree::evict, "num_pages"_a,
          "Frees up to `num_pages` pages that nobody else holds, the least recently used leaf first; returns how many.")
      .def("clear", &PrefixTree::clear, "Forgets every page; those that others hold live on with them.")
      .def_prop_ro("tokens_per_page", &PrefixTree::tokens_per_page, "Tokens of one page.")
      .def_prop_ro("num_pages", &PrefixTree::num_pages, "Pages in the tree.")
      .def_prop_ro("num_evictable", &PrefixTree::num_evictable, "Pages that `evict` can free now.")
      .def(
          "contains", [](const PrefixTree& tree, std::int32_t slot) { return tree.contains(SlotId{slot}); }, "slot"_a,
          "Whether the tree has this slot's page. Raises InvalidArgument for a slot outside the pool.")
      .def("check", &PrefixTree::check, "Aborts the process if the tree contradicts itself or the pool; O(num_slots).");
}

void bind_sequence(nb::module_& m) {
  nb::class_<SequencePages>(m, "SequencePages",
                            "The pages of one sequence and how far they are filled, in tokens: committed (full pages "
                            "offered to the tree) <= computed (entries written) <= capacity (pages held).")
      .def(
          nb::init<PagePool&, PrefixTree*, std::int32_t, std::string>(), "pool"_a, "tree"_a.none(), "tokens_per_page"_a,
          "salt"_a = "", nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
          "`tree` is None where prefixes are not cached. Raises InvalidArgument unless tokens_per_page >= 1 and equals "
          "the tree's.")
      .def(
          "attach_prefix", [](SequencePages& s, const std::vector<TokenId>& tokens) { return s.attach_prefix(tokens); },
          "tokens"_a,
          "Takes the longest cached prefix of `tokens` as the first pages; returns its length in tokens. Raises "
          "InvalidArgument unless the sequence is empty.")
      .def(
          "probe_prefix", [](SequencePages& s, const std::vector<TokenId>& tokens) { return s.probe_prefix(tokens); },
          "tokens"_a, "What `attach_prefix` would return, without pinning anything.")
      .def("grow", &SequencePages::grow, "num_tokens"_a,
           "Makes room for `num_tokens` tokens in all, evicting if needed. All or nothing: False changes nothing.")
      .def("pages_to_grow", &SequencePages::pages_to_grow, "num_tokens"_a, "Pages that `grow` would have to obtain.")
      .def("set_computed", &SequencePages::set_computed, "num_tokens"_a,
           "A completed step wrote the entries below. Raises InvalidArgument below the value so far or above capacity.")
      .def(
          "commit", [](SequencePages& s, const std::vector<TokenId>& tokens) { s.commit(tokens); }, "tokens"_a,
          "Offers every full page below `computed` to the tree. Raises InvalidArgument for too few tokens.")
      .def(
          "enter_all", [](SequencePages& s, const std::vector<TokenId>& tokens) { s.enter_all(tokens); }, "tokens"_a,
          "Enters committed pages that wait behind the tree's copies. To be called right before a release.")
      .def("release", &SequencePages::release, "Drops every page.")
      .def(
          "release_to_step",
          [](SequencePages& s) {
            std::vector<PageRef> pages;
            s.release_to_step(pages);
            return handles_of(s.pool(), std::move(pages));
          },
          "Hands every page to a step in flight that still uses it: returns their handles, now STEP's.")
      .def_prop_ro("committed", &SequencePages::committed, "Tokens of full pages offered to the tree.")
      .def_prop_ro("computed", &SequencePages::computed, "Tokens whose entries completed steps have written.")
      .def_prop_ro("capacity", &SequencePages::capacity, "Tokens that the pages held have room for.")
      .def_prop_ro(
          "slots",
          [](const SequencePages& s) {
            std::vector<std::int32_t> slots;
            for (const PageRef& page : s.pages()) {
              slots.push_back(page.slot().value());
            }
            return slots;
          },
          "Slots of the pages, in token order.");
}

}  // namespace
}  // namespace tandem::kv

void bind_kv(nb::module_& m) {
  tandem::kv::bind_pool(m);
  tandem::kv::bind_tree(m);
  tandem::kv::bind_sequence(m);
}
