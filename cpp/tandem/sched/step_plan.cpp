#include "tandem/sched/step_plan.h"

#include <algorithm>

#include "tandem/base/check.h"

namespace tandem::sched {
namespace {

// Cuts one block into arrays that each start on a cache line. Called twice: without a block it only adds up sizes.
class Arena {
 public:
  explicit Arena(std::byte* block) : block_(block) {}

  template <typename T>
  void take(T*& array, std::int64_t size) {
    constexpr std::size_t kLine = 64;
    if (block_ != nullptr) {
      array = reinterpret_cast<T*>(block_ + used_);
    }
    used_ += (static_cast<std::size_t>(size) * sizeof(T) + kLine - 1) / kLine * kLine;
  }
  [[nodiscard]] std::size_t used() const { return used_; }

 private:
  std::byte* block_;
  std::size_t used_ = 0;
};

}  // namespace

StepPlan::StepPlan(const Limits& limits) : limits_(limits) {
  const auto lay_out = [&](std::byte* block) {
    Arena arena(block);
    const std::int64_t num_rows = limits.max_rows;
    arena.take(seq_id_, num_rows);
    for (std::int32_t** array :
         {&epoch_, &seat_, &kind_, &first_index_, &query_len_, &write_from_, &num_drafts_, &max_length_}) {
      arena.take(*array, num_rows);
    }
    arena.take(token_offsets_, num_rows + 1);
    arena.take(token_ids_, limits.max_token_ids);
    arena.take(table_changes_, limits.max_table_changes);
    arena.take(samples_, num_rows);
    arena.take(proposes_, num_rows);
    arena.take(fresh_, num_rows);
    return arena.used();
  };
  block_ = std::make_unique_for_overwrite<std::byte[]>(lay_out(nullptr));
  (void)lay_out(block_.get());
  token_offsets_[0] = 0;
  sequences_.reserve(static_cast<std::size_t>(limits.max_rows));
}

void StepPlan::begin(StepId step_id) {
  step_id_ = step_id;
  num_rows_ = 0;
  num_sampling_rows_ = 0;
  num_tokens_ = 0;
  num_token_ids_ = 0;
  num_table_changes_ = 0;
  token_offsets_[0] = 0;
  sequences_.clear();
}

void StepPlan::add_token_ids(std::span<const TokenId> ids, bool last_from_device) {
  const std::int32_t num_ids = static_cast<std::int32_t>(ids.size()) + (last_from_device ? 1 : 0);
  TANDEM_CHECK(num_token_ids_ + num_ids <= limits_.max_token_ids, "a step has more token ids than its budget allows");
  TokenId* const end = std::copy(ids.begin(), ids.end(), token_ids_ + num_token_ids_);
  num_token_ids_ = static_cast<std::int32_t>(end - token_ids_);
  if (last_from_device) {
    token_ids_[num_token_ids_++] = -1;
  }
}

void StepPlan::list_new_pages(Sequence& sequence) {
  const auto num_pages = static_cast<std::int32_t>(sequence.pages.num_pages());
  TANDEM_CHECK(num_pages - sequence.num_listed_pages <= table_changes_left(),
               "a step changes more table entries than it has room for");
  for (std::int32_t page = sequence.num_listed_pages; page < num_pages; ++page) {
    table_changes_[num_table_changes_++] = {sequence.seat.value(), page, sequence.pages.slot(page).value()};
  }
  sequence.num_listed_pages = num_pages;
}

}  // namespace tandem::sched
