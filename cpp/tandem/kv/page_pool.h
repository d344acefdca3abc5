#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "tandem/base/strong_id.h"

namespace tandem::kv {

// Who holds a page. Every handle names its holder; what a page *is* follows from which holders it has.
enum class Holder : std::uint8_t {
  Sequence,  // the table of a running sequence
  Step,      // a step in flight whose table named the page; the sequence may be gone
  Lease,     // a peer that may read the page until its lease ends
  Tree,      // the prefix tree
};
inline constexpr std::size_t kNumHolders = 4;

// Exactly one per slot: held if a sequence or a step has a handle, else leased if a lease has one, else cached if the
// tree has one, else free.
enum class PageState : std::uint8_t { Free, Cached, Held, Leased };

// How many slots are in each state. The four add up to `total`.
struct Ledger {
  std::int64_t free = 0;
  std::int64_t cached = 0;
  std::int64_t held = 0;
  std::int64_t leased = 0;
  std::int64_t total = 0;
  friend bool operator==(const Ledger&, const Ledger&) = default;
};

class PagePool;

// A handle of one page: the only way to keep it. Move-only; the last handle dropped frees the slot. An empty handle
// (default-made, moved-from or reset) holds nothing, converts to false and may only be assigned, reset or destroyed.
class PageRef {
 public:
  PageRef() = default;
  PageRef(PageRef&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)),
        slot_(std::exchange(other.slot_, SlotId{})),
        holder_(other.holder_) {}
  PageRef& operator=(PageRef&& other) noexcept {
    if (this != &other) {
      reset();
      pool_ = std::exchange(other.pool_, nullptr);
      slot_ = std::exchange(other.slot_, SlotId{});
      holder_ = other.holder_;
    }
    return *this;
  }
  PageRef(const PageRef&) = delete;
  PageRef& operator=(const PageRef&) = delete;
  ~PageRef() { reset(); }

  explicit operator bool() const noexcept { return pool_ != nullptr; }
  [[nodiscard]] SlotId slot() const;
  [[nodiscard]] Holder holder() const;
  [[nodiscard]] const PagePool* pool() const noexcept { return pool_; }

  // Another handle of the same page. The tree's own is made by `PrefixTree` alone.
  [[nodiscard]] PageRef share(Holder holder) const;
  // Makes this handle another holder's, e.g. a sequence's one the step's that still uses the page.
  void retag(Holder holder);
  // Drops the handle.
  void reset() noexcept;

 private:
  friend class PagePool;
  PageRef(PagePool* pool, SlotId slot, Holder holder) : pool_(pool), slot_(slot), holder_(holder) {}

  PagePool* pool_ = nullptr;
  SlotId slot_;
  Holder holder_ = Holder::Sequence;
};

// Told when a page of the tree gets its first handle beside the tree's, and when it loses its last one.
class PinListener {
 public:
  virtual void on_pinned(SlotId slot) noexcept = 0;
  virtual void on_unpinned(SlotId slot) noexcept = 0;

 protected:
  ~PinListener() = default;
};

// The slots of one cache and who holds them. Knows no bytes: slot ids are given meaning by the layout. Used by one
// thread. Must outlive its handles: a pool destroyed while any is alive aborts.
class PagePool {
 public:
  // Throws InvalidArgument unless num_slots >= 1.
  explicit PagePool(std::int32_t num_slots);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // A free page, or nothing when there is none. O(1).
  [[nodiscard]] std::optional<PageRef> allocate(Holder holder = Holder::Sequence);

  [[nodiscard]] std::int32_t num_slots() const { return static_cast<std::int32_t>(counts_.size()); }
  [[nodiscard]] std::int32_t num_free() const { return static_cast<std::int32_t>(free_.size()); }
  // Pages that only steps in flight (and perhaps the tree) still hold: they come back when those steps complete. O(1).
  [[nodiscard]] std::int32_t num_pending() const { return num_pending_; }

  // Throws InvalidArgument for a slot outside the pool.
  [[nodiscard]] PageState state(SlotId slot) const;
  // Handles of one holder kind on a slot. Throws InvalidArgument for a slot outside the pool.
  [[nodiscard]] std::uint32_t num_handles(SlotId slot, Holder holder) const;
  // True if anyone beside the tree holds the slot. O(1).
  [[nodiscard]] bool is_pinned(SlotId slot) const { return pins(counts_[slot.index()]) != 0; }

  // Counts every slot's state from its handles. O(num_slots): for tests and metrics, not for the step.
  [[nodiscard]] Ledger ledger() const;
  // Aborts unless the free list and the running counts agree with the handles. O(num_slots).
  void check() const;

  // At most one listener (the prefix tree); nullptr removes it. Throws InvalidArgument for a second one.
  void set_pin_listener(PinListener* listener);

 private:
  friend class PageRef;
  using Counts = std::array<std::uint32_t, kNumHolders>;

  static std::uint32_t of(const Counts& counts, Holder holder) { return counts[static_cast<std::size_t>(holder)]; }
  static std::uint32_t pins(const Counts& c) {
    return of(c, Holder::Sequence) + of(c, Holder::Step) + of(c, Holder::Lease);
  }
  static bool pending(const Counts& c) {
    return of(c, Holder::Step) != 0 && of(c, Holder::Sequence) == 0 && of(c, Holder::Lease) == 0;
  }

  [[nodiscard]] const Counts& counts(SlotId slot) const;
  void add(SlotId slot, Holder holder) noexcept;
  void drop(SlotId slot, Holder holder) noexcept;
  void retag(SlotId slot, Holder from, Holder to) noexcept;

  std::vector<Counts> counts_;      // by slot
  std::vector<std::int32_t> free_;  // a stack: the slot freed last is handed out first
  std::int32_t num_pending_ = 0;
  PinListener* listener_ = nullptr;
};

inline void PageRef::reset() noexcept {
  if (pool_ != nullptr) {
    std::exchange(pool_, nullptr)->drop(std::exchange(slot_, SlotId{}), holder_);
  }
}

}  // namespace tandem::kv
