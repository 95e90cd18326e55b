// Adds up what clusters have of each column, of one or two sums, as many times the blocks.
#include "config.cuh"
#include "ptx.cuh"

constexpr int WIDTH = 32, SLICES = 8;  // columns of a block, and warps that share the parts

extern "C" __global__ void __launch_bounds__(WIDTH * SLICES)
    norm_column_sums(const float* parts, float* dweight, float* dbias, int clusters, int n) {
  __shared__ float of_slices[SLICES][WIDTH];
  const int lane = threadIdx.x % WIDTH, slice = threadIdx.x / WIDTH;
  const int across = ceil_div(n, WIDTH), column = blockIdx.x % across * WIDTH + lane;
  const bool second = blockIdx.x >= across;
  const float* from = parts + (second ? int64_t(clusters) * n : 0) + column;
  float total = 0;
  if (column < n) {
#pragma unroll 4
    for (int i = slice; i < clusters; i += SLICES) total += from[int64_t(i) * n];
  }
  of_slices[slice][lane] = total;
  __syncthreads();
  if (slice || column >= n) return;
#pragma unroll
  for (int i = 1; i < SLICES; ++i) total += of_slices[i][lane];
  (second ? dbias : dweight)[column] = total;
}
