#pragma once

#include "tandem/sched/types.h"

namespace tandem::sched::testing {

// Room for everything unless a test makes one thing scarce: 4-token pages, no drafter, no overlap.
inline SchedulerConfig roomy() {
  SchedulerConfig config;
  config.num_slots = 256;
  config.tokens_per_page = 4;
  config.max_seats = 8;
  config.max_tokens_per_step = 256;
  config.max_model_len = 256;
  config.overlap = false;
  return config;
}

inline SchedulerConfig with_drafts(std::int32_t draft_len, SchedulerConfig config = roomy()) {
  config.has_drafter = true;
  config.draft_len = draft_len;
  return config;
}

inline SchedulerConfig overlapped(SchedulerConfig config = roomy()) {
  config.overlap = true;
  return config;
}

}  // namespace tandem::sched::testing
