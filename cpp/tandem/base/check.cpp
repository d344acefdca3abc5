#include "tandem/base/check.h"

#include <cstdio>
#include <cstdlib>

namespace tandem {

void check_failed(const char* file, int line, const char* condition, const std::string& message) {
  std::fprintf(stderr, "tandem: internal error at %s:%d: %s (%s)\n", file, line, message.c_str(), condition);
  std::fflush(stderr);
  std::abort();
}

}  // namespace tandem
