// Adds up the raw sums of a product whose K was split, and finishes them.
#include "epilogue.cuh"

extern "C" __global__ void reduce(const int* raw, int pitch, int slab, const Epilogue to) {
  const int64_t all = int64_t(rows_of(to)) * to.n, stride = int64_t(gridDim.x) * blockDim.x;
  const float scale = scale_of(to);
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < all; i += stride) {
    const int row = i / to.n, column = i - int64_t(row) * to.n;
    int sum = 0;
#pragma unroll
    for (int split = 0; split < SPLIT; ++split) {
      sum += raw[(int64_t(split) * slab + row) * pitch + column];
    }
    const float x = finished(sum, to, scale, weight_of(to, row), column);
    if (OUTPUT == FP32) static_cast<float*>(to.c)[i] = x;
    else static_cast<uint16_t*>(to.c)[i] = uint16_t(pack(x, 0.0f));
  }
}
