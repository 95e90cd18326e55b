// The C function for Python as it is, with outputs given: for trying a change right after a build.
// Unlike an operator's, this module may be loaded again in one process.
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/utils/pybind.h>

#include "checks.h"

namespace {

using at::Tensor;

const char* const SCRATCH = WORKSPACE_ZEROS ? "zeros" : "scratch";

const char* number_name(int which) {
  for (int i = 0; i < DIMS; i++)
    if (ORIGINS[i][0] < 0 && which-- == 0) return SIZES[i];
  return nullptr;
}

template <class Tensors, class Numbers, class Scratch, class Dims>
struct Binding;

// Of so many tensors, numbers and workspaces.
template <size_t... T, size_t... N, size_t... S, size_t... D>
struct Binding<std::index_sequence<T...>, std::index_sequence<N...>, std::index_sequence<S...>,
               std::index_sequence<D...>> {
  static void run(Repeated<const Tensor&, T>... tensor, Repeated<int64_t, N>... number,
                  Repeated<const Tensor&, S>... scratch, uintptr_t stream) {
    const Tensor* const tensors[] = {&tensor...};
    const int64_t numbers[] = {number..., 0};
    const Sizes sizes = sizes_of(tensors, numbers);
    const int device = tensors[0]->get_device();
    check_all(tensors, TENSORS, sizes, device);
    const int64_t bytes = static_cast<int64_t>(workspace_bytes(sizes.data()));
    (check(scratch, SCRATCH, ScalarType::Byte, std::array<int64_t, 1>{bytes}, device), ...);
    void* const workspaces[] = {scratch.mutable_data_ptr()..., nullptr};
    const c10::DeviceGuard guard(tensors[0]->device());
    if (!writes_nothing(sizes))
      call_function(tensors, sizes, workspaces[0], reinterpret_cast<void*>(stream));
  }

  static size_t bytes(Repeated<int, D>... size) {
    const int sizes[] = {size...};
    return workspace_bytes(sizes);
  }

  static void define(pybind11::module_& module) {
    using pybind11::arg;
    module.def(NAME, &run, arg(PARAMETERS[T].name)..., arg(number_name(N))...,
               ((void)S, arg(SCRATCH))..., arg("stream") = 0,
               "Enqueue on a stream of the tensors' device, by its address (0: the default).");
    if (HAS_WORKSPACE)
      module.def("workspace_bytes", &bytes,
                 "Bytes of the scratch memory, uint8; calls that may overlap need one each.");
  }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  Binding<std::make_index_sequence<TENSORS>, std::make_index_sequence<NUMBERS>,
          std::make_index_sequence<HAS_WORKSPACE>, std::make_index_sequence<DIMS>>::define(module);
}
