#include "tandem/layout/digest.h"

#include <cstdint>

namespace tandem::layout {

std::string digest_of(std::string_view text) {
  using Word = unsigned __int128;
  constexpr Word kBasis = (Word{0x6c62272e07bb0142} << 64) | Word{0x62b821756295c58d};
  constexpr Word kPrime = (Word{1} << 88) | Word{0x13b};
  Word hash = kBasis;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * kPrime;
  }
  std::string hex;
  for (int shift = 124; shift >= 0; shift -= 4) {
    hex.push_back("0123456789abcdef"[static_cast<std::size_t>((hash >> shift) & 0xf)]);
  }
  return hex;
}

}  // namespace tandem::layout
