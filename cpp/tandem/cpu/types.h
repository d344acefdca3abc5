#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tandem::cpu {

// Element types of activations, weights and cache tiles. Arithmetic is fp32 throughout.
enum class DType : std::uint8_t { F32, BF16 };

// The upper 16 bits of an fp32 value.
struct Bf16 {
  std::uint16_t bits;
};

[[nodiscard]] constexpr std::int64_t size_of(DType dtype) { return dtype == DType::F32 ? 4 : 2; }
[[nodiscard]] constexpr const char* name_of(DType dtype) { return dtype == DType::F32 ? "float32" : "bfloat16"; }

// A matrix whose rows are contiguous; `stride` is the distance between rows in elements.
struct ConstMatrix {
  const void* data = nullptr;
  DType dtype = DType::F32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t stride = 0;

  [[nodiscard]] const void* row(std::int64_t index) const {
    return static_cast<const std::byte*>(data) + index * stride * size_of(dtype);
  }
};

struct Matrix {
  void* data = nullptr;
  DType dtype = DType::F32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t stride = 0;

  [[nodiscard]] void* row(std::int64_t index) const {
    return static_cast<std::byte*>(data) + index * stride * size_of(dtype);
  }
  // A writable matrix reads as a constant one.
  operator ConstMatrix() const { return {data, dtype, rows, cols, stride}; }  // NOLINT(google-explicit-constructor)
};

}  // namespace tandem::cpu
