// Stands for PyTorch's stable interface: tensors are shapes, and there is a GPU that is never used.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

using torch::headeronly::ScalarType;
using AOTITorchError = int32_t;
#define TORCH_ERROR_CODE_CHECK(code) (void)(code)
#define TORCH_BOX(function) nullptr
#define STABLE_TORCH_LIBRARY(name, library) [[maybe_unused]] static void define_##name(Library& library)
#define STABLE_TORCH_LIBRARY_IMPL(name, key, library) \
  [[maybe_unused]] static void implement_##name(Library& library)

struct Library {
  void def(const char*) {}
  void impl(const char*, void*) {}
};

namespace torch::stable {

struct View {
  const int64_t* data;
  size_t count;
  const int64_t* begin() const { return data; }
  const int64_t* end() const { return data + count; }
};

struct Tensor {
  std::vector<int64_t> shape;
  ScalarType dtype = ScalarType::Byte;

  int64_t dim() const { return static_cast<int64_t>(shape.size()); }
  int64_t size(int64_t side) const { return shape[side]; }
  int64_t numel() const {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    return count;
  }
  View sizes() const { return {shape.data(), shape.size()}; }
  View strides() const { return sizes(); }
  ScalarType scalar_type() const { return dtype; }
  bool is_contiguous() const { return true; }
  bool is_cuda() const { return true; }
  int get_device() const { return 0; }
  void* mutable_data_ptr() const { return nullptr; }
  const void* const_data_ptr() const { return nullptr; }
};

inline Tensor new_empty(const Tensor&, View sizes, ScalarType dtype) {
  return {{sizes.begin(), sizes.end()}, dtype};
}
inline Tensor new_empty(const Tensor&, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return {sizes, dtype};
}
inline Tensor new_zeros(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return new_empty(like, sizes, dtype);
}

namespace accelerator {
struct DeviceGuard {
  explicit DeviceGuard(int) {}
};
}  // namespace accelerator

}  // namespace torch::stable
