#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tandem/cpu/cache_view.h"
#include "tandem/cpu/cache_write.h"
#include "tandem/cpu/isa.h"
#include "tandem/cpu/thread_pool.h"
#include "tandem/cpu/types.h"

namespace tandem::cpu::testing {

inline constexpr unsigned kSeed = 20240607;  // of every test here

// Runs a test on each instruction set of the machine, with two threads.
class EachIsa : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    set_isa(GetParam());
    ThreadPool::shared().set_num_threads(2);
  }
  void TearDown() override { set_isa(supported_isas().back()); }

  std::mt19937 rng{kSeed};
};

#define TANDEM_EACH_ISA(suite)                                                               \
  INSTANTIATE_TEST_SUITE_P(Isa, suite, ::testing::ValuesIn(::tandem::cpu::supported_isas()), \
                           [](const auto& isa) { return isa.param; })

// Rounds to nearest even, one value at a time and by arithmetic rather than bits.
inline float round_to_bf16(float x) {
  if (x == 0.0f || !std::isfinite(x)) return x;
  int exponent = 0;
  std::frexp(x, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent - 8, -133));  // spacing of 8 significant bits
  return static_cast<float>(std::nearbyint(static_cast<double>(x) / unit) * unit);
}

inline Bf16 to_bf16(float x) {
  std::uint32_t bits = 0;
  const float rounded = round_to_bf16(x);
  std::memcpy(&bits, &rounded, sizeof bits);
  return {static_cast<std::uint16_t>(bits >> 16)};
}

inline float from_bf16(Bf16 x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A contiguous tensor with its elements as floats beside it.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::int64_t rows, std::int64_t cols)
      : dtype_(dtype), rows_(rows), cols_(cols), bytes_(static_cast<std::size_t>(rows * cols * size_of(dtype))) {}

  static Tensor random(DType dtype, std::int64_t rows, std::int64_t cols, std::mt19937& rng, float scale = 1.0f) {
    Tensor tensor(dtype, rows, cols);
    std::normal_distribution<float> normal(0.0f, scale);
    for (std::int64_t i = 0; i < rows * cols; ++i) tensor.set(i, normal(rng));
    return tensor;
  }

  void set(std::int64_t i, float x) {
    if (dtype_ == DType::F32) {
      std::memcpy(bytes_.data() + i * 4, &x, 4);
    } else {
      const Bf16 half = std::isnan(x) ? Bf16{0x7fc0} : to_bf16(x);
      std::memcpy(bytes_.data() + i * 2, &half, 2);
    }
  }
  [[nodiscard]] float operator[](std::int64_t i) const {
    if (dtype_ == DType::F32) {
      float x = 0;
      std::memcpy(&x, bytes_.data() + i * 4, 4);
      return x;
    }
    Bf16 half{};
    std::memcpy(&half, bytes_.data() + i * 2, 2);
    return from_bf16(half);
  }
  [[nodiscard]] float at(std::int64_t row, std::int64_t col) const { return (*this)[row * cols_ + col]; }

  [[nodiscard]] Matrix view() { return rows_view(0, rows_); }
  [[nodiscard]] Matrix rows_view(std::int64_t first, std::int64_t count) {
    return {bytes_.data() + first * cols_ * size_of(dtype_), dtype_, count, cols_, cols_};
  }
  [[nodiscard]] std::int64_t rows() const { return rows_; }
  [[nodiscard]] std::int64_t cols() const { return cols_; }
  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] void* data() { return bytes_.data(); }
  friend bool operator==(const Tensor& a, const Tensor& b) { return a.bytes_ == b.bytes_; }  // the same bits

 private:
  DType dtype_ = DType::F32;
  std::int64_t rows_ = 0;
  std::int64_t cols_ = 0;
  std::vector<std::byte> bytes_;
};

// Half a unit in the last place of bf16 at x, plus what fp32 arithmetic may lose.
inline double tolerance(DType dtype, double x, double fp32) {
  return fp32 + (dtype == DType::BF16 ? std::abs(x) / 256.0 : 0.0);
}

// Cuts n rows into pieces in a few ways: one by one, as a whole, and ragged.
inline std::vector<std::vector<std::int64_t>> splits(std::int64_t n) {
  std::vector<std::vector<std::int64_t>> ways = {std::vector<std::int64_t>(static_cast<std::size_t>(n), 1), {n}};
  std::vector<std::int64_t> ragged;
  for (std::int64_t left = n, piece = 1; left > 0; piece = piece * 2 + 1) {
    ragged.push_back(std::min(left, piece));
    left -= ragged.back();
  }
  ways.push_back(ragged);
  std::reverse(ragged.begin(), ragged.end());
  ways.push_back(ragged);
  return ways;
}

struct CacheShape {
  DType dtype = DType::F32;
  std::int64_t heads = 2;
  std::int64_t dim = 16;
  std::int64_t tokens_per_page = 4;  // of the views
  std::int64_t sub_pages = 1;
  std::int64_t seats = 2;
  std::int64_t pages = 8;  // of a sequence
};

// A pool of K, V and one-headed index tiles, head outermost, with slots in random order. Every byte that no token was
// stored to is 0xff, which is a NaN in fp32 and bf16.
class TestCache {
 public:
  enum Role { kKeys = 0, kValues = 1, kIndexKeys = 2 };

  TestCache(const CacheShape& cache_shape, std::mt19937& rng) : shape(cache_shape) {
    const std::int64_t token = shape.dim * size_of(shape.dtype);
    const std::int64_t tile = aligned(token * shape.tokens_per_page * shape.sub_pages);
    const std::int64_t slot = aligned(2 * tile * shape.heads + tile) + kAlignment;
    for (int role = 0; role < 3; ++role) {
      views_[role] = {.dtype = shape.dtype,
                      .heads = role == kIndexKeys ? 1 : shape.heads,
                      .dim = shape.dim,
                      .tokens_per_page = shape.tokens_per_page,
                      .sub_pages = shape.sub_pages,
                      .base_offset = role == kIndexKeys ? 2 * tile * shape.heads : role * tile,
                      .slot_stride = slot,
                      .head_stride = 2 * tile,
                      .sub_page_stride = token * shape.tokens_per_page,
                      .token_stride = token};
    }
    const std::int64_t slots = shape.seats * shape.pages + 3;
    bytes.assign(static_cast<std::size_t>(slots * slot), std::byte{0xff});
    std::vector<std::int32_t> order(static_cast<std::size_t>(slots));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    table_slots.assign(order.begin(), order.begin() + shape.seats * shape.pages);
  }

  [[nodiscard]] const CacheView& view(Role role) const { return views_[role]; }
  [[nodiscard]] Pool pool() { return {bytes.data(), static_cast<std::int64_t>(bytes.size())}; }
  [[nodiscard]] BlockTable table() const { return {table_slots.data(), shape.seats, shape.pages}; }

  void store(Role role, std::int64_t seat, std::int64_t index, std::int64_t head, std::int64_t d, float x) {
    std::byte* to = bytes.data() + byte_of(role, seat, index, head, d);
    if (shape.dtype == DType::F32) {
      std::memcpy(to, &x, 4);
    } else {
      const Bf16 half = to_bf16(x);
      std::memcpy(to, &half, 2);
    }
  }
  [[nodiscard]] float load(Role role, std::int64_t seat, std::int64_t index, std::int64_t head, std::int64_t d) const {
    const std::byte* from = bytes.data() + byte_of(role, seat, index, head, d);
    if (shape.dtype == DType::F32) {
      float x = 0;
      std::memcpy(&x, from, 4);
      return x;
    }
    Bf16 half{};
    std::memcpy(&half, from, 2);
    return from_bf16(half);
  }

  // Random contents for the first `length` tokens of a seat; the rest stays poisoned.
  void fill(std::int64_t seat, std::int64_t length, std::mt19937& rng) {
    std::normal_distribution<float> normal;
    for (const Role role : {kKeys, kValues, kIndexKeys}) {
      for (std::int64_t index = 0; index < length; ++index) {
        for (std::int64_t head = 0; head < views_[role].heads; ++head) {
          for (std::int64_t d = 0; d < shape.dim; ++d) store(role, seat, index, head, d, normal(rng));
        }
      }
    }
  }

  CacheShape shape;
  std::vector<std::byte> bytes;
  std::vector<std::int32_t> table_slots;

 private:
  static constexpr std::int64_t kAlignment = 128;
  static std::int64_t aligned(std::int64_t n) { return (n + kAlignment - 1) / kAlignment * kAlignment; }

  // The address by definition, not through the library.
  [[nodiscard]] std::int64_t byte_of(Role role, std::int64_t seat, std::int64_t index, std::int64_t head,
                                     std::int64_t d) const {
    const CacheView& v = views_[role];
    const std::int64_t page = shape.tokens_per_page * shape.sub_pages;
    const std::int64_t slot = table_slots[static_cast<std::size_t>(seat * shape.pages + index / page)];
    return v.base_offset + slot * v.slot_stride + head * v.head_stride +
           index % page / shape.tokens_per_page * v.sub_page_stride + index % shape.tokens_per_page * v.token_stride +
           d * size_of(shape.dtype);
  }

  CacheView views_[3];
};

}  // namespace tandem::cpu::testing
