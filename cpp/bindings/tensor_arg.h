#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <string>

#include "tandem/base/check.h"
#include "tandem/cpu/types.h"

// Tensors as kernel arguments. A torch tensor is read through the C table of functions that its type publishes
// (`__dlpack_c_exchange_api__`): no capsule, no allocation, some ten nanoseconds a tensor.
namespace tandem::bindings {

// A dense tensor in host memory, borrowed for the call. Shape and strides are copied: up to four axes.
class TensorArg {
 public:
  static constexpr int kMaxAxes = 4;

  // False if `object` is no tensor of a type that publishes the table; the Python error, if any, is cleared.
  bool load(nanobind::handle object) noexcept;

  [[nodiscard]] int ndim() const { return ndim_; }
  [[nodiscard]] std::int64_t size(int axis) const { return shape_[static_cast<std::size_t>(axis)]; }
  [[nodiscard]] std::int64_t stride(int axis) const { return strides_[static_cast<std::size_t>(axis)]; }
  [[nodiscard]] void* data() const { return data_; }

  // InvalidArgument naming the argument unless it lies in host memory, has `axes` axes, and is contiguous in the last
  // `contiguous` of them (all by default).
  const TensorArg& require(const char* argument, int axes, int contiguous = kMaxAxes) const;
  [[nodiscard]] bool is_contiguous(int axes) const;

  [[nodiscard]] cpu::DType float_dtype(const char* argument) const;  // float32 or bfloat16, else InvalidArgument
  [[nodiscard]] float* floats(const char* argument) const;
  [[nodiscard]] std::int32_t* ints(const char* argument) const;
  [[nodiscard]] std::byte* bytes(const char* argument) const;
  // Two axes, rows contiguous.
  [[nodiscard]] cpu::Matrix matrix(const char* argument) const;
  // InvalidArgument unless axis `axis` has `expected` entries.
  void require_size(const char* argument, int axis, std::int64_t expected) const;

  // "bfloat16 [4, 128]"
  [[nodiscard]] std::string describe() const;

 private:
  [[noreturn]] void refuse(const char* argument, const std::string& expected) const;
  [[nodiscard]] bool is(nanobind::dlpack::dtype_code code, int bits) const {
    return dtype_.code == static_cast<std::uint8_t>(code) && dtype_.bits == bits && dtype_.lanes == 1;
  }

  void* data_ = nullptr;
  int ndim_ = 0;  // may exceed kMaxAxes, then shape and strides hold the first ones
  std::int32_t device_ = 0;
  nanobind::dlpack::dtype dtype_;
  std::array<std::int64_t, kMaxAxes> shape_ = {};
  std::array<std::int64_t, kMaxAxes> strides_ = {};  // elements
};

}  // namespace tandem::bindings

namespace nanobind::detail {

template <>
struct type_caster<tandem::bindings::TensorArg> {
  NB_TYPE_CASTER(tandem::bindings::TensorArg, const_name("torch.Tensor"))

  bool from_python(handle src, std::uint32_t, cleanup_list*) noexcept { return value.load(src); }
};

}  // namespace nanobind::detail
