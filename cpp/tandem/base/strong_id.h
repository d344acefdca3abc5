#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace tandem {

// An integer that only mixes with its own kind. `Tag` names the kind; conversion to and from plain integers is
// explicit.
template <typename Tag, typename Rep>
class StrongId {
 public:
  using rep = Rep;
  constexpr StrongId() = default;
  constexpr explicit StrongId(Rep value) : value_(value) {}
  [[nodiscard]] constexpr Rep value() const { return value_; }
  [[nodiscard]] constexpr std::size_t index() const { return static_cast<std::size_t>(value_); }
  friend constexpr auto operator<=>(StrongId, StrongId) = default;

 private:
  Rep value_ = -1;
};

using SlotId = StrongId<struct SlotTag, std::int32_t>;    // a place in the pool
using SeatId = StrongId<struct SeatTag, std::int32_t>;    // a running sequence's index in the device vectors
using SeqId = StrongId<struct SeqTag, std::int64_t>;      // a request, for the life of the scheduler
using StepId = StrongId<struct StepTag, std::int64_t>;    // one pass of the engine
using LayerId = StrongId<struct LayerTag, std::int32_t>;  // a layer of the cache, target and draft alike

}  // namespace tandem

template <typename Tag, typename Rep>
struct std::hash<tandem::StrongId<Tag, Rep>> {
  std::size_t operator()(tandem::StrongId<Tag, Rep> id) const noexcept { return std::hash<Rep>{}(id.value()); }
};
