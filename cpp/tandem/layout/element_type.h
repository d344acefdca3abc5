#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace tandem::layout {

// How one number of a tile is stored.
enum class ElementType : std::uint8_t {
  BF16,
  FP16,
  FP32,
  FP8_E4M3,
  NVFP4,  // two E2M1 numbers a byte; every 16 along dim share one FP8_E4M3 scale, which is a tile of its own
};
inline constexpr std::array kElementTypes = {ElementType::BF16, ElementType::FP16, ElementType::FP32,
                                             ElementType::FP8_E4M3, ElementType::NVFP4};

// Numbers along dim that share one scale in NVFP4.
inline constexpr std::int32_t kNvfp4Group = 16;

[[nodiscard]] std::int64_t element_bits(ElementType type);
[[nodiscard]] std::string_view name(ElementType type);

}  // namespace tandem::layout
