#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::kv {

using TokenId = std::int32_t;

// Hash of a namespace: what the first page of its sequences is chained to.
[[nodiscard]] std::uint64_t hash_salt(std::string_view salt);

// Hash of a page's tokens chained to the hash of the page before it. Deterministic across processes of one byte order.
// A hash only finds candidates: whoever looks a page up compares its tokens.
[[nodiscard]] std::uint64_t hash_page(std::uint64_t parent, std::span<const TokenId> tokens);

// The chained hashes of one sequence's full pages. Each page is hashed once, when it is first seen full; a partial last
// page never is. Hashes stay valid as long as the tokens below them do, so they survive preemption.
class PageHashes {
 public:
  // Throws InvalidArgument unless tokens_per_page >= 1.
  PageHashes(std::int32_t tokens_per_page, std::string salt);

  // Hashes the full pages of `tokens` that are not hashed yet and returns those of all full pages of `tokens`. `tokens`
  // must start with the tokens of earlier calls. Throws InvalidArgument for a negative token id.
  std::span<const std::uint64_t> extend(std::span<const TokenId> tokens);

  [[nodiscard]] std::int32_t tokens_per_page() const { return tokens_per_page_; }
  [[nodiscard]] const std::string& salt() const { return salt_; }
  // Pages hashed so far.
  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(hashes_.size()); }
  void reserve(std::int64_t num_pages) { hashes_.reserve(static_cast<std::size_t>(num_pages)); }

 private:
  std::int32_t tokens_per_page_;
  std::string salt_;
  std::uint64_t salt_hash_;
  std::vector<std::uint64_t> hashes_;
};

}  // namespace tandem::kv
