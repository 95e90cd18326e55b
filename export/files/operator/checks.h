// What tensors must be, said of one that is not, and the call of the C function with them: for
// tensors of PyTorch's stable interface and of the other one alike.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <climits>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "manifest.h"

using torch::headeronly::ScalarType;

enum { OUTPUTS = TENSORS - INPUTS };

template <class T, size_t>
using Repeated = T;

template <class... Parts>
[[noreturn]] void refuse(const char* tensor, const Parts&... parts) {
  std::ostringstream message;
  message << NAME << ": " << tensor << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// In the order of `Dtype`.
constexpr ScalarType SCALAR_TYPES[] = {
    ScalarType::Char,  ScalarType::Byte,     ScalarType::Int,  ScalarType::Long,
    ScalarType::Float, ScalarType::BFloat16, ScalarType::Half,
};
constexpr const char* SCALAR_NAMES[] = {
    "int8", "uint8", "int32", "int64", "float32", "bfloat16", "float16",
};

inline std::string name_of(ScalarType dtype) {
  for (size_t i = 0; i < std::size(SCALAR_TYPES); i++)
    if (SCALAR_TYPES[i] == dtype) return SCALAR_NAMES[i];
  return torch::headeronly::toString(dtype);
}

// As Python writes a shape.
template <class Sizes>
std::string text_of(const Sizes& sizes) {
  std::string text = "(";
  for (const int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + ")";
}

// As the function takes it.
inline int narrow(int64_t size, const char* name) {
  if (size > INT_MAX) refuse(name, "expected a size of at most ", INT_MAX, ", given ", size);
  return static_cast<int>(size);
}

using Sizes = std::array<int, DIMS>;

// The sizes that inputs and numbers say.
template <class Tensor>
Sizes sizes_of(const Tensor* const* inputs, const int64_t* numbers) {
  Sizes sizes;
  for (int i = 0; i < DIMS; i++) {
    const auto [input, side] = ORIGINS[i];
    if (input < 0) {
      sizes[i] = narrow(*numbers++, SIZES[i]);
      continue;
    }
    const Tensor& tensor = *inputs[input];
    const Parameter& parameter = PARAMETERS[input];
    if (tensor.dim() != parameter.sides)
      refuse(parameter.name, "expected ", parameter.sides, " dimensions, given a shape of ",
             text_of(tensor.sizes()));
    sizes[i] = narrow(tensor.size(side), SIZES[i]);
  }
  return sizes;
}

struct Shape {
  std::array<int64_t, MOST_SIDES> side;
  size_t count;

  const int64_t* begin() const { return side.data(); }
  const int64_t* end() const { return side.data() + count; }
};

inline Shape shape_of(const Parameter& parameter, const Sizes& sizes) {
  Shape shape{{}, static_cast<size_t>(parameter.sides)};
  for (size_t i = 0; i < shape.count; i++)
    shape.side[i] = extent_of(parameter.shape[i], sizes.data());
  return shape;
}

template <class Tensor, class Expected>
void check(const Tensor& tensor, const char* name, ScalarType dtype, const Expected& expected,
           int device) {
  if (tensor.scalar_type() != dtype)
    refuse(name, "expected ", name_of(dtype), ", given ", name_of(tensor.scalar_type()));
  const auto given = tensor.sizes();
  if (!std::equal(given.begin(), given.end(), expected.begin(), expected.end()))
    refuse(name, "expected a shape of ", text_of(expected), ", given ", text_of(given));
  if (!tensor.is_contiguous())
    refuse(name, "expected a contiguous tensor, given strides of ", text_of(tensor.strides()));
  if (!tensor.is_cuda()) refuse(name, "expected a CUDA tensor, given one that is none");
  if (tensor.get_device() != device)
    refuse(name, "expected a tensor on cuda:", device, ", given one on cuda:",
           static_cast<int>(tensor.get_device()));
  if (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 != 0)
    refuse(name, "expected an address that is a multiple of 16, given a view that begins at none");
}

template <class Tensor>
void check_all(const Tensor* const* tensors, int count, const Sizes& sizes, int device) {
  for (int i = 0; i < count; i++) {
    const Parameter& parameter = PARAMETERS[i];
    check(*tensors[i], parameter.name, SCALAR_TYPES[parameter.dtype], shape_of(parameter, sizes),
          device);
  }
}

// Whether a call has nothing to write.
inline bool writes_nothing(const Sizes& sizes) {
  for (const Parameter& parameter : PARAMETERS)
    if ((parameter.role & WRITTEN) && count_of(&parameter, sizes.data()) > 0) return false;
  return true;
}

template <class Tensor>
void call_function(const Tensor* const* tensors, const Sizes& sizes, void* workspace,
                   void* stream) {
  void* address[TENSORS];
  for (int i = 0; i < TENSORS; i++)
    address[i] = PARAMETERS[i].role & WRITTEN ? tensors[i]->mutable_data_ptr()
                                              : const_cast<void*>(tensors[i]->const_data_ptr());
  const int code = call(address, sizes.data(), workspace, static_cast<CUstream_st*>(stream));
  if (code != 0) refuse("cannot run", error_text(code));
}
