#pragma once

#include <cstdint>
#include <string>

#include "tandem/base/check.h"

namespace tandem::cpu {

// InvalidArgument naming the first value that is negative or not below `bound`.
inline void require_below(const char* what, const std::int32_t* values, std::int64_t count, std::int64_t bound) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (values[i] < 0 || values[i] >= bound) {
      throw InvalidArgument(std::string(what) + " " + std::to_string(values[i]) + " at " + std::to_string(i) +
                            " is out of range: " + std::to_string(bound) + " exist");
    }
  }
}

}  // namespace tandem::cpu
