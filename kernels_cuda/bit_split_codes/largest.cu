// The unit of bit splitting, and zeros for the columns' totals.
#include "arguments.cuh"

constexpr int THREADS = 256;
constexpr uint32_t ALL = 0xFFFFFFFFu;
constexpr uint32_t TINY = 27u << 23, INFINITE = 255u << 23;  // the bits of 2^-100 and infinity

// Find the unit, the largest scale over MOST_BITS' float, and have the totals be zero. Magnitudes
// are compared as their bits, in which infinity and every NaN are above all numbers.
extern "C" __global__ void __launch_bounds__(THREADS) largest(const Arguments p) {
  const int first = blockIdx.x * THREADS + threadIdx.x;
#pragma unroll 1
  for (int i = first; SUMS && i <= p.n; i += gridDim.x * THREADS) p.totals[i] = 0;
  uint32_t most = 0;
#pragma unroll 1
  for (int row = blockIdx.x; row < ceil_div(p.m, BLOCK); row += gridDim.x) {
    const float* scales = p.scale + row * p.scale_pitch;
    for (int i = threadIdx.x; i < ceil_div(p.n, BLOCK); i += THREADS) {
      most = max(most, __float_as_uint(scales[i]) & 0x7FFFFFFF);
    }
  }
  most = __reduce_max_sync(ALL, most);
  if (threadIdx.x % 32 == 0) atomicMax(&p.counters[0], most);
  __threadfence();
  __syncthreads();
  const uint32_t last = gridDim.x - 1;
  if (threadIdx.x || atomicInc(&p.counters[1], last) != last) return;
  __threadfence();
  const uint32_t all = atomicExch(&p.counters[0], 0u);
  const float quotient = __fdiv_rn(__uint_as_float(all), __int_as_float(MOST_BITS));
  *p.unit = all >= INFINITE ? __int_as_float(0x7FC00000) : all < TINY ? 0.0f : quotient;
}
