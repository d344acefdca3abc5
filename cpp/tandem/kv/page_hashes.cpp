#include "tandem/kv/page_hashes.h"

#include <array>
#include <cstddef>
#include <cstring>
#include <utility>

#include "tandem/base/check.h"

namespace tandem::kv {
namespace {

// The multiplicands have their top bit set and token ids do not (they are >= 0), so no factor of a product below can
// become zero by an unlucky token and wipe out the other one.
constexpr std::array<std::uint64_t, 8> kKeys = {0x9a3f5c7be1d04863, 0xc86b1f94d7325ae9, 0xf1427d0eb9865c3b,
                                                0xa5d83be6704f1c97, 0xd70c62b91fae4385, 0xb3951ed84c67f02b,
                                                0xe82f76a3059dc14d, 0x8c64d90fb71e32a5};

// Multiplies to 128 bits and folds the halves together.
std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

std::uint64_t load(const unsigned char* bytes) {
  std::uint64_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

// Four independent chains over 64-byte stripes keep the multiplier busy; the tail is padded into one more stripe, and
// the length, mixed in at the end, tells padding from content.
std::uint64_t hash_bytes(std::uint64_t seed, const unsigned char* bytes, std::size_t size) {
  std::array<std::uint64_t, 4> lanes = {seed, seed ^ kKeys[4], seed ^ kKeys[5], seed ^ kKeys[6]};
  const auto stripe = [&lanes](const unsigned char* p) {
    for (std::size_t i = 0; i < 4; ++i) {
      lanes[i] = fold(load(p + 16 * i) ^ kKeys[i], load(p + 16 * i + 8) ^ lanes[i] ^ kKeys[i + 4]);
    }
  };
  std::size_t at = 0;
  for (; at + 64 <= size; at += 64) {
    stripe(bytes + at);
  }
  if (at < size) {
    std::array<unsigned char, 64> tail{};
    std::memcpy(tail.data(), bytes + at, size - at);
    stripe(tail.data());
  }
  const std::uint64_t left = fold(lanes[0] ^ kKeys[0], lanes[1] ^ kKeys[7] ^ size);
  const std::uint64_t right = fold(lanes[2] ^ kKeys[2], lanes[3] ^ kKeys[3]);
  return fold(left ^ kKeys[1], right ^ kKeys[5]);
}

}  // namespace

std::uint64_t hash_salt(std::string_view salt) {
  return hash_bytes(kKeys[7], reinterpret_cast<const unsigned char*>(salt.data()), salt.size());
}

std::uint64_t hash_page(std::uint64_t parent, std::span<const TokenId> tokens) {
  return hash_bytes(parent, reinterpret_cast<const unsigned char*>(tokens.data()), tokens.size_bytes());
}

PageHashes::PageHashes(std::int32_t tokens_per_page, std::string salt)
    : tokens_per_page_(tokens_per_page), salt_(std::move(salt)), salt_hash_(hash_salt(salt_)) {
  if (tokens_per_page < 1) {
    throw InvalidArgument("PageHashes: tokens_per_page is " + std::to_string(tokens_per_page) + ", must be at least 1");
  }
}

std::span<const std::uint64_t> PageHashes::extend(std::span<const TokenId> tokens) {
  const auto page_size = static_cast<std::size_t>(tokens_per_page_);
  const std::size_t num_full = tokens.size() / page_size;
  while (hashes_.size() < num_full) {
    const auto page = tokens.subspan(hashes_.size() * page_size, page_size);
    TokenId bits = 0;
    for (const TokenId token : page) {
      bits |= token;
    }
    if (bits < 0) {
      throw InvalidArgument("a negative token id among tokens " + std::to_string(hashes_.size() * page_size) + " to " +
                            std::to_string((hashes_.size() + 1) * page_size - 1) + "; ids are at least 0");
    }
    hashes_.push_back(hash_page(hashes_.empty() ? salt_hash_ : hashes_.back(), page));
  }
  return std::span<const std::uint64_t>(hashes_).first(num_full);
}

}  // namespace tandem::kv
