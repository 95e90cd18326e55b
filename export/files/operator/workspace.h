// Scratch memory of an operator's calls.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "checks.h"

// Weak: a PyTorch without CUDA lacks it, and may still load this to trace the operator.
extern "C" __attribute__((weak)) AOTITorchError torch_cuda_stream_synchronize(
    void* stream, int32_t device);

namespace {

using torch::stable::Tensor;

// Memory that a call finds at zero and leaves at zero. Calls on one stream run in turn and share
// theirs; those captured in graphs, which may be replayed on any stream, have one each. It is kept
// for ever: graphs hold its addresses.
constexpr size_t SPARE_BYTES = 4 << 20;  // of each device, for captured calls

struct Scratch {
  Tensor owner;
  void* address;
};

struct Spare {
  char* address = nullptr;
  size_t left = 0;
};

std::mutex workspaces;
// Never destroyed: at exit PyTorch may have gone by then.
auto& of_stream = *new std::map<std::pair<int, void*>, Scratch>;
auto& of_device = *new std::map<int, Spare>;
auto& kept = *new std::vector<Tensor>;

Scratch zeros(size_t bytes, const Tensor& like) {
  const Tensor owner =
      torch::stable::new_zeros(like, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  return {owner, owner.mutable_data_ptr()};
}

bool is_captured(void* stream) {
  using Query = int (*)(void* stream, int* status);
  static const auto query = reinterpret_cast<Query>(
      dlsym(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL), "cuStreamIsCapturing"));
  int status = 0;
  return query(stream, &status) == 0 && status != 0;
}

Scratch zeros_for_call(size_t bytes, const Tensor& like, int device, void* stream) {
  const std::lock_guard<std::mutex> lock(workspaces);
  Spare& spare = of_device[device];
  if (is_captured(stream)) {
    const size_t aligned = (bytes + 255) / 256 * 256;
    // Without room, zeroed by a node of the graph at each replay: as right, but slower.
    if (aligned > spare.left) return zeros(bytes, like);
    spare.left -= aligned;
    return {like, spare.address + spare.left};
  }
  if (spare.left < SPARE_BYTES / 4) {
    const Scratch fresh = zeros(SPARE_BYTES, like);
    kept.push_back(fresh.owner);
    spare = {static_cast<char*>(fresh.address), SPARE_BYTES};
    // A graph on another stream may be the first to use it.
    TORCH_ERROR_CODE_CHECK(torch_cuda_stream_synchronize(stream, device));
  }
  auto found = of_stream.find({device, stream});
  if (found != of_stream.end() && found->second.owner.numel() < static_cast<int64_t>(bytes))
    found = (of_stream.erase(found), of_stream.end());
  if (found == of_stream.end())
    found = of_stream.emplace(std::pair{device, stream}, zeros(bytes, like)).first;
  return found->second;
}

// What a call may use of memory, where it needs some.
Scratch scratch_for_call(const Sizes& sizes, const Tensor& like, int device, void* stream) {
  if constexpr (!HAS_WORKSPACE) return {like, nullptr};
  const size_t bytes = workspace_bytes(sizes.data());
  if constexpr (WORKSPACE_ZEROS) return zeros_for_call(bytes, like, device, stream);
  const Tensor owner =
      torch::stable::new_empty(like, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  return {owner, owner.mutable_data_ptr()};
}

}  // namespace
