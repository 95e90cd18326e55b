// The kernel's operator, on PyTorch's stable C++ interface: built once, it works with every PyTorch
// from the one on that it is built for.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "checks.h"
#include "workspace.h"

// Where Hugging Face's kernels are built the namespace is the build's, and Python imports this.
#if __has_include("registration.h")
#include "registration.h"
#define NAMESPACE TORCH_EXTENSION_NAME
REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
#else
#define NAMESPACE IDENTIFIER
#endif
#define LIBRARY(name, library) STABLE_TORCH_LIBRARY(name, library)
#define LIBRARY_IMPL(name, key, library) STABLE_TORCH_LIBRARY_IMPL(name, key, library)

// Weak: a PyTorch without CUDA lacks it, and may still load this to trace the operator.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(
    int32_t device, void** stream);

namespace {

Tensor allocate(const Tensor& like, const Parameter& parameter, const Sizes& sizes) {
  const Shape shape = shape_of(parameter, sizes);
  return torch::stable::new_empty(like, {shape.begin(), shape.count},
                                  SCALAR_TYPES[parameter.dtype]);
}

template <class Inputs, class Numbers, class Outputs>
struct Operator;

// Of so many inputs, numbers and outputs.
template <size_t... I, size_t... N, size_t... O>
struct Operator<std::index_sequence<I...>, std::index_sequence<N...>, std::index_sequence<O...>> {
  static std::tuple<Repeated<Tensor, O>...> run(Repeated<const Tensor&, I>... input,
                                                Repeated<int64_t, N>... number) {
    const Tensor* const inputs[] = {&input...};
    const int64_t numbers[] = {number..., 0};
    const Tensor& first = *inputs[0];
    const Sizes sizes = sizes_of(inputs, numbers);
    const int device = first.get_device();
    check_all(inputs, INPUTS, sizes, device);
    const torch::stable::accelerator::DeviceGuard guard(device);
    const std::array<Tensor, OUTPUTS> outputs = {
        allocate(first, PARAMETERS[INPUTS + O], sizes)...};
    if (!writes_nothing(sizes)) {
      void* stream = nullptr;
      TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
      const Scratch scratch = scratch_for_call(sizes, first, device, stream);
      const Tensor* const tensors[] = {&input..., &outputs[O]...};
      call_function(tensors, sizes, scratch.address, stream);
    }
    return {outputs[O]...};
  }
};

using Kernel = Operator<std::make_index_sequence<INPUTS>, std::make_index_sequence<NUMBERS>,
                        std::make_index_sequence<OUTPUTS>>;

}  // namespace

LIBRARY(NAMESPACE, library) { library.def(NAME SCHEMA); }

LIBRARY_IMPL(NAMESPACE, CUDA, library) { library.impl(NAME, TORCH_BOX(&Kernel::run)); }
