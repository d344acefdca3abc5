#include "tandem/kv/page_pool.h"

#include <string>

#include "tandem/base/check.h"

namespace tandem::kv {

SlotId PageRef::slot() const {
  TANDEM_CHECK(pool_ != nullptr, "slot() of an empty page handle");
  return slot_;
}

Holder PageRef::holder() const {
  TANDEM_CHECK(pool_ != nullptr, "holder() of an empty page handle");
  return holder_;
}

PageRef PageRef::share(Holder holder) const {
  TANDEM_CHECK(pool_ != nullptr, "share() of an empty page handle");
  pool_->add(slot_, holder);
  return PageRef(pool_, slot_, holder);
}

void PageRef::retag(Holder holder) {
  TANDEM_CHECK(pool_ != nullptr, "retag() of an empty page handle");
  pool_->retag(slot_, holder_, holder);
  holder_ = holder;
}

PagePool::PagePool(std::int32_t num_slots) {
  if (num_slots < 1) {
    throw InvalidArgument("PagePool: num_slots is " + std::to_string(num_slots) + ", must be at least 1");
  }
  counts_.resize(static_cast<std::size_t>(num_slots));
  free_.reserve(counts_.size());
  for (std::int32_t slot = num_slots - 1; slot >= 0; --slot) {
    free_.push_back(slot);
  }
}

PagePool::~PagePool() {
  TANDEM_CHECK(free_.size() == counts_.size(), "page pool destroyed with " +
                                                   std::to_string(counts_.size() - free_.size()) + " of " +
                                                   std::to_string(counts_.size()) + " pages still held by handles");
}

std::optional<PageRef> PagePool::allocate(Holder holder) {
  TANDEM_CHECK(holder != Holder::Tree, "a page enters the tree after it was filled, not when it is allocated");
  if (free_.empty()) {
    return std::nullopt;
  }
  const SlotId slot{free_.back()};
  free_.pop_back();
  counts_[slot.index()][static_cast<std::size_t>(holder)] = 1;
  num_pending_ += holder == Holder::Step ? 1 : 0;
  return PageRef(this, slot, holder);
}

void PagePool::add(SlotId slot, Holder holder) noexcept {
  Counts& handles = counts_[slot.index()];
  const bool was_pinned = pins(handles) != 0;
  const bool was_pending = pending(handles);
  ++handles[static_cast<std::size_t>(holder)];
  num_pending_ += static_cast<int>(pending(handles)) - static_cast<int>(was_pending);
  if (!was_pinned && holder != Holder::Tree && listener_ != nullptr) {
    listener_->on_pinned(slot);
  }
}

void PagePool::drop(SlotId slot, Holder holder) noexcept {
  Counts& handles = counts_[slot.index()];
  const bool was_pending = pending(handles);
  TANDEM_CHECK(of(handles, holder) != 0, "page handle dropped twice");
  --handles[static_cast<std::size_t>(holder)];
  num_pending_ += static_cast<int>(pending(handles)) - static_cast<int>(was_pending);
  if (pins(handles) != 0) {
    return;
  }
  if (of(handles, Holder::Tree) == 0) {
    free_.push_back(slot.value());
  } else if (holder != Holder::Tree && listener_ != nullptr) {
    listener_->on_unpinned(slot);
  }
}

void PagePool::retag(SlotId slot, Holder from, Holder to) noexcept {
  TANDEM_CHECK(from != Holder::Tree && to != Holder::Tree, "a tree's handle cannot change its holder");
  Counts& handles = counts_[slot.index()];
  const bool was_pending = pending(handles);
  --handles[static_cast<std::size_t>(from)];
  ++handles[static_cast<std::size_t>(to)];
  num_pending_ += static_cast<int>(pending(handles)) - static_cast<int>(was_pending);
}

const PagePool::Counts& PagePool::counts(SlotId slot) const {
  if (slot.value() < 0 || slot.value() >= num_slots()) {
    throw InvalidArgument("slot is " + std::to_string(slot.value()) + ", must be from 0 to " +
                          std::to_string(num_slots() - 1));
  }
  return counts_[slot.index()];
}

PageState PagePool::state(SlotId slot) const {
  const Counts& handles = counts(slot);
  if (of(handles, Holder::Sequence) != 0 || of(handles, Holder::Step) != 0) {
    return PageState::Held;
  }
  if (of(handles, Holder::Lease) != 0) {
    return PageState::Leased;
  }
  return of(handles, Holder::Tree) != 0 ? PageState::Cached : PageState::Free;
}

std::uint32_t PagePool::num_handles(SlotId slot, Holder holder) const { return of(counts(slot), holder); }

Ledger PagePool::ledger() const {
  Ledger ledger;
  ledger.total = num_slots();
  for (std::int32_t slot = 0; slot < num_slots(); ++slot) {
    switch (state(SlotId{slot})) {
      case PageState::Free:
        ++ledger.free;
        break;
      case PageState::Cached:
        ++ledger.cached;
        break;
      case PageState::Held:
        ++ledger.held;
        break;
      case PageState::Leased:
        ++ledger.leased;
        break;
    }
  }
  return ledger;
}

void PagePool::check() const {
  std::vector<bool> seen(counts_.size(), false);
  for (const std::int32_t slot : free_) {
    const SlotId id{slot};
    TANDEM_CHECK(!seen[id.index()], "slot " + std::to_string(slot) + " is in the free list twice");
    seen[id.index()] = true;
    TANDEM_CHECK(state(id) == PageState::Free, "slot " + std::to_string(slot) + " is in the free list and has handles");
  }
  std::int32_t num_pending = 0;
  for (const Counts& handles : counts_) {
    num_pending += pending(handles) ? 1 : 0;
  }
  TANDEM_CHECK(num_pending == num_pending_, "the pending count does not match the handles");
  const Ledger now = ledger();
  TANDEM_CHECK(now.free == num_free(), "a slot without handles is missing from the free list");
  TANDEM_CHECK(now.free + now.cached + now.held + now.leased == now.total, "the ledger does not add up");
}

void PagePool::set_pin_listener(PinListener* listener) {
  if (listener != nullptr && listener_ != nullptr) {
    throw InvalidArgument("this page pool has a prefix tree already; it can have one at most");
  }
  listener_ = listener;
}

}  // namespace tandem::kv
