#pragma once

#include <stdexcept>
#include <string>

namespace tandem {

// A caller's mistake. The message names what was given and what is allowed.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Our own bug: prints the place and the message, then aborts.
[[noreturn]] void check_failed(const char* file, int line, const char* condition, const std::string& message);

}  // namespace tandem

// Checks an internal invariant. Never for input: that is InvalidArgument.
#define TANDEM_CHECK(condition, message)                                 \
  do {                                                                   \
    if (!(condition)) [[unlikely]] {                                     \
      ::tandem::check_failed(__FILE__, __LINE__, #condition, (message)); \
    }                                                                    \
  } while (false)
