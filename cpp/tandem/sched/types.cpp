#include "tandem/sched/types.h"

#include <algorithm>

#include "tandem/base/check.h"

namespace tandem::sched {
namespace {

void require_at_least(const char* field, std::int64_t value, std::int64_t least, const char* why = "") {
  if (value < least) {
    throw InvalidArgument(std::string("SchedulerConfig.") + field + " is " + std::to_string(value) +
                          ", must be at least " + std::to_string(least) + why);
  }
}

}  // namespace

std::string_view to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::None:
      return "none";
    case FinishReason::Stop:
      return "stop";
    case FinishReason::Length:
      return "length";
    case FinishReason::Abort:
      return "abort";
    case FinishReason::Error:
      return "error";
  }
  check_failed(__FILE__, __LINE__, "reason", "a finish reason outside its enumeration");
}

void SchedulerConfig::validate() const {
  require_at_least("num_slots", num_slots, 1);
  require_at_least("tokens_per_page", tokens_per_page, 1);
  require_at_least("max_seats", max_seats, 1);
  require_at_least("max_model_len", max_model_len, 2, " (one prompt token and one generated)");
  // Token indices are int32 and a plan looks a few rounds ahead of them.
  if (constexpr std::int32_t kMost = 1 << 30; max_model_len > kMost || max_tokens_per_step > kMost) {
    throw InvalidArgument("SchedulerConfig.max_model_len is " + std::to_string(max_model_len) +
                          " and max_tokens_per_step " + std::to_string(max_tokens_per_step) + ", must be at most " +
                          std::to_string(kMost));
  }
  require_at_least("draft_len", draft_len, 0);
  if (draft_len > kMaxDraftLen) {
    throw InvalidArgument("SchedulerConfig.draft_len is " + std::to_string(draft_len) + ", must be at most " +
                          std::to_string(kMaxDraftLen));
  }
  if (draft_len > 0 && !has_drafter) {
    throw InvalidArgument("SchedulerConfig.draft_len is " + std::to_string(draft_len) +
                          ", must be 0 without a drafter (has_drafter is false)");
  }
  require_at_least("max_tokens_per_step", max_tokens_per_step, 1 + draft_len, " (one decode row: 1 + draft_len)");
  require_at_least("watermark_pages", watermark_pages, 0);
  require_at_least("max_speculating_rows", max_speculating_rows, 0);
}

std::int32_t SchedulerConfig::decode_reach() const { return has_drafter ? std::max(draft_len + 1, 2 * draft_len) : 0; }

std::int32_t SchedulerConfig::look_ahead() const { return 1 + decode_reach() + (overlap ? 1 + draft_len : 0); }

std::int64_t SchedulerConfig::max_sequence_tokens() const {
  return std::min<std::int64_t>(max_model_len, std::int64_t{num_slots} * tokens_per_page);
}

}  // namespace tandem::sched
