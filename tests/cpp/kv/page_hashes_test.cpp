#include "tandem/kv/page_hashes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <unordered_set>
#include <vector>

#include "tandem/base/check.h"

namespace tandem::kv {
namespace {

constexpr std::uint64_t kSeed = 20240607;

TEST(PageHashes, HashesOnlyFullPagesAndEachOnce) {
  PageHashes hashes(4, "");
  std::vector<TokenId> tokens(11);
  std::iota(tokens.begin(), tokens.end(), 0);
  EXPECT_TRUE(hashes.extend(std::span(tokens).first(3)).empty());
  EXPECT_EQ(hashes.extend(std::span(tokens).first(4)).size(), 1U);
  EXPECT_EQ(hashes.extend(std::span(tokens).first(7)).size(), 1U);
  EXPECT_EQ(hashes.size(), 1);
  EXPECT_EQ(hashes.extend(tokens).size(), 2U);
  // The first page is not looked at again: a change there shows in no hash.
  const std::vector<std::uint64_t> before(hashes.extend(tokens).begin(), hashes.extend(tokens).end());
  tokens[0] = 99;
  EXPECT_TRUE(std::ranges::equal(hashes.extend(tokens), before));
}

TEST(PageHashes, GrownTokenByTokenEqualThoseOfTheWhole) {
  std::vector<TokenId> tokens(40);
  std::iota(tokens.begin(), tokens.end(), 7);
  PageHashes grown(5, "s");
  for (std::size_t n = 0; n <= tokens.size(); ++n) {
    grown.extend(std::span(tokens).first(n));
  }
  PageHashes whole(5, "s");
  EXPECT_TRUE(std::ranges::equal(grown.extend(tokens), whole.extend(tokens)));
  EXPECT_EQ(whole.extend(tokens)[1], hash_page(whole.extend(tokens)[0], std::span(tokens).subspan(5, 5)));
  EXPECT_EQ(whole.extend(tokens)[0], hash_page(hash_salt("s"), std::span(tokens).first(5)));
}

TEST(PageHashes, GiveAShorterPrefixItsOwnPages) {
  std::vector<TokenId> tokens(12, 3);
  PageHashes hashes(4, "");
  EXPECT_EQ(hashes.extend(tokens).size(), 3U);
  EXPECT_EQ(hashes.extend(std::span(tokens).first(9)).size(), 2U);
}

TEST(PageHashes, RefuseNegativeTokens) {
  PageHashes hashes(4, "");
  EXPECT_THROW(hashes.extend(std::vector<TokenId>{1, 2, -1, 4}), InvalidArgument);
  EXPECT_TRUE(hashes.extend(std::vector<TokenId>{1, 2, -1}).empty());
  EXPECT_THROW(PageHashes(0, ""), InvalidArgument);
}

TEST(PageHash, DependsOnEveryBitOfEveryTokenOnThePrefixAndOnTheLength) {
  for (const std::size_t size : {1U, 2U, 4U, 15U, 16U, 17U, 32U, 128U}) {
    std::vector<TokenId> tokens(size);
    std::iota(tokens.begin(), tokens.end(), 1000);
    std::unordered_set<std::uint64_t> seen = {hash_page(1, tokens)};
    for (std::size_t i = 0; i < size; ++i) {
      for (int bit = 0; bit < 31; ++bit) {
        tokens[i] ^= 1 << bit;
        EXPECT_TRUE(seen.insert(hash_page(1, tokens)).second);
        tokens[i] ^= 1 << bit;
      }
    }
    EXPECT_TRUE(seen.insert(hash_page(2, tokens)).second);
    tokens.push_back(0);
    EXPECT_TRUE(seen.insert(hash_page(1, tokens)).second);
  }
}

TEST(PageHash, SpreadsOverTheLowBitsThatTheIndexUses) {
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  // Pages that differ in one small number, as repeated prompts do, into 4096 buckets of 16 on average.
  std::vector<int> buckets(4096);
  std::vector<TokenId> tokens(128, 5);
  for (TokenId i = 0; i < 65536; ++i) {
    tokens[77] = i;
    ++buckets[hash_page(0, tokens) & 4095];
  }
  // A Poisson count of mean 16 leaves [1, 44] with probability under 1e-6.
  EXPECT_GE(*std::ranges::min_element(buckets), 1);
  EXPECT_LE(*std::ranges::max_element(buckets), 44);
}

TEST(PageHash, OfSaltsDiffers) {
  std::unordered_set<std::uint64_t> seen;
  for (const std::string salt : {"", "a", "b", "ab", "ba", "tenant-1", "tenant-2"}) {
    EXPECT_TRUE(seen.insert(hash_salt(salt)).second);
  }
  EXPECT_TRUE(seen.insert(hash_salt(std::string_view("\0", 1))).second);
}

}  // namespace
}  // namespace tandem::kv
