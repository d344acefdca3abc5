#include "tandem/layout/element_type.h"

#include "tandem/base/check.h"

namespace tandem::layout {

std::int64_t element_bits(ElementType type) {
  switch (type) {
    case ElementType::BF16:
    case ElementType::FP16:
      return 16;
    case ElementType::FP32:
      return 32;
    case ElementType::FP8_E4M3:
      return 8;
    case ElementType::NVFP4:
      return 4;
  }
  TANDEM_CHECK(false, "an element type without a size");
}

std::string_view name(ElementType type) {
  switch (type) {
    case ElementType::BF16:
      return "BF16";
    case ElementType::FP16:
      return "FP16";
    case ElementType::FP32:
      return "FP32";
    case ElementType::FP8_E4M3:
      return "FP8_E4M3";
    case ElementType::NVFP4:
      return "NVFP4";
  }
  TANDEM_CHECK(false, "an element type without a name");
}

}  // namespace tandem::layout
