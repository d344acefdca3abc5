#include "tensor_arg.h"

#include <algorithm>

#include "tape.h"

namespace tandem::bindings {

namespace nb = nanobind;

namespace {

// The part of DLPack's exchange table that is used here; the layout is DLPack's, major version 1.
struct ExchangeTable {
  std::uint32_t major;
  std::uint32_t minor;
  ExchangeTable* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_object;
  void* managed_tensor_to_object;
  int (*tensor_from_object)(void* object, nb::dlpack::dltensor* out);
  void* current_work_stream;
};

const ExchangeTable* find_table(PyTypeObject* type) noexcept {
  nb::object capsule =
      nb::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__"));
  const ExchangeTable* table = nullptr;
  if (capsule.is_valid() && PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
    table = static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    while (table != nullptr && table->major > 1) table = table->previous;
    if (table != nullptr && (table->major != 1 || table->tensor_from_object == nullptr)) table = nullptr;
  }
  PyErr_Clear();
  return table;
}

// Types seen last; all callers hold the interpreter's lock. Only types with a table are kept, and kept alive.
const ExchangeTable* table_of(PyTypeObject* type) noexcept {
  struct Entry {
    PyTypeObject* type = nullptr;
    const ExchangeTable* table = nullptr;
  };
  static std::array<Entry, 4> seen;  // torch.Tensor, torch.nn.Parameter and the like
  static std::size_t next = 0;
  for (const Entry& entry : seen) {
    if (entry.type == type) return entry.table;
  }
  const ExchangeTable* table = find_table(type);
  if (table == nullptr) return nullptr;
  Entry& entry = seen[next++ % seen.size()];
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  Py_XDECREF(reinterpret_cast<PyObject*>(entry.type));
  entry = {type, table};
  return table;
}

std::string name_of(nb::dlpack::dtype dtype) {
  const char* kind = "dtype";
  switch (static_cast<nb::dlpack::dtype_code>(dtype.code)) {
    case nb::dlpack::dtype_code::Int:
      kind = "int";
      break;
    case nb::dlpack::dtype_code::UInt:
      kind = "uint";
      break;
    case nb::dlpack::dtype_code::Float:
      kind = "float";
      break;
    case nb::dlpack::dtype_code::Bfloat:
      kind = "bfloat";
      break;
    case nb::dlpack::dtype_code::Bool:
      kind = "bool";
      break;
    case nb::dlpack::dtype_code::Complex:
      kind = "complex";
      break;
    default:
      break;
  }
  return kind + std::to_string(dtype.bits);
}

}  // namespace

bool TensorArg::load(nb::handle object) noexcept {
  const ExchangeTable* table = table_of(Py_TYPE(object.ptr()));
  if (table == nullptr) return false;
  nb::dlpack::dltensor tensor;
  if (table->tensor_from_object(object.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  data_ = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  ndim_ = tensor.ndim;
  device_ = tensor.device.device_type;
  dtype_ = tensor.dtype;
  for (int axis = 0; axis < std::min(ndim_, kMaxAxes); ++axis) {
    shape_[static_cast<std::size_t>(axis)] = tensor.shape[axis];
    strides_[static_cast<std::size_t>(axis)] = tensor.strides[axis];
  }
  if (Tape* tape = Tape::recording()) tape->keep(object);
  return true;
}

std::string TensorArg::describe() const {
  std::string text = name_of(dtype_) + " [";
  for (int axis = 0; axis < std::min(ndim_, kMaxAxes); ++axis) {
    text += (axis == 0 ? "" : ", ") + std::to_string(size(axis));
  }
  return text + (ndim_ > kMaxAxes ? ", ...]" : "]");
}

void TensorArg::refuse(const char* argument, const std::string& expected) const {
  throw InvalidArgument(std::string(argument) + " is " + describe() + ": expected " + expected);
}

bool TensorArg::is_contiguous(int axes) const {
  std::int64_t expected = 1;
  for (int axis = ndim_ - 1; axis >= std::max(0, ndim_ - axes); --axis) {
    if (size(axis) != 1 && stride(axis) != expected) return false;
    expected *= size(axis);
  }
  return true;
}

const TensorArg& TensorArg::require(const char* argument, int axes, int contiguous) const {
  if (device_ != nb::device::cpu::value) refuse(argument, "a tensor on the cpu");
  if (ndim_ != axes) refuse(argument, std::to_string(axes) + " axes");
  if (!is_contiguous(contiguous)) {
    refuse(argument, contiguous >= axes ? "contiguous memory"
                                        : "contiguous memory in the last " + std::to_string(contiguous) + " axes");
  }
  return *this;
}

void TensorArg::require_size(const char* argument, int axis, std::int64_t expected) const {
  if (size(axis) != expected) refuse(argument, std::to_string(expected) + " on axis " + std::to_string(axis));
}

cpu::DType TensorArg::float_dtype(const char* argument) const {
  if (is(nb::dlpack::dtype_code::Float, 32)) return cpu::DType::F32;
  if (is(nb::dlpack::dtype_code::Bfloat, 16)) return cpu::DType::BF16;
  refuse(argument, "float32 or bfloat16");
}

float* TensorArg::floats(const char* argument) const {
  if (!is(nb::dlpack::dtype_code::Float, 32)) refuse(argument, "float32");
  return static_cast<float*>(data_);
}

std::int32_t* TensorArg::ints(const char* argument) const {
  if (!is(nb::dlpack::dtype_code::Int, 32)) refuse(argument, "int32");
  return static_cast<std::int32_t*>(data_);
}

std::byte* TensorArg::bytes(const char* argument) const {
  if (!is(nb::dlpack::dtype_code::UInt, 8)) refuse(argument, "uint8");
  return static_cast<std::byte*>(data_);
}

cpu::Matrix TensorArg::matrix(const char* argument) const {
  require(argument, 2, 1);
  return {.data = data_,
          .dtype = float_dtype(argument),
          .rows = size(0),
          .cols = size(1),
          .stride = size(0) > 1 ? stride(0) : size(1)};
}

}  // namespace tandem::bindings
