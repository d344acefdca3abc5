#pragma once

#include <string>
#include <string_view>

namespace tandem::layout {

// 128-bit FNV-1a of `text` as 32 hex digits. For telling descriptions apart, not against an attacker.
// Source: the FNV-1a algorithm of Fowler, Noll and Vo, with their 128-bit offset basis and prime.
[[nodiscard]] std::string digest_of(std::string_view text);

}  // namespace tandem::layout
