// Copies a matrix of bytes with rows of any pitch and alignment into rows of a multiple of 16
// bytes, which the tensor memory accelerator wants. A thread writes 16 bytes, from the five aligned
// words that they lie in.
#include "ptx.cuh"

extern "C" __global__ void pad(uint4* to, const uint8_t* from, int rows, int columns, int64_t pitch) {
  const int chunks = ceil_div(columns, 16);
  const int64_t all = int64_t(rows) * chunks;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < all; i += step) {
    const int64_t row = i / chunks, column = i % chunks * 16;
    const uint64_t begin = reinterpret_cast<uint64_t>(from + row * pitch + column);
    const uint64_t end = reinterpret_cast<uint64_t>(from + row * pitch + columns);
    const uint32_t* words = reinterpret_cast<const uint32_t*>(begin & ~uint64_t(3));
    uint32_t word[5];
#pragma unroll
    for (int j = 0; j < 5; ++j) {
      // A word that holds a byte of the row is one that may be read.
      word[j] = reinterpret_cast<uint64_t>(words + j) < end ? words[j] : 0;
    }
    const uint32_t bits = uint32_t(begin % 4) * 8;
    to[i] = make_uint4(__funnelshift_r(word[0], word[1], bits), __funnelshift_r(word[1], word[2], bits),
                       __funnelshift_r(word[2], word[3], bits), __funnelshift_r(word[3], word[4], bits));
  }
}
