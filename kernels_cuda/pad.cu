// Copies a matrix of bytes with rows of any pitch and alignment into rows of a multiple of 16
// bytes, which the tensor memory accelerator wants. A block copies whole rows, a thread four bytes
// at a time, from the two aligned words that they lie in.
#include "ptx.cuh"

// The word at an aligned address, of which only the bytes within [begin, end) may be read.
DEVICE uint32_t load_word(const uint8_t* at, const uint8_t* begin, const uint8_t* end) {
  if (at >= begin && at + 4 <= end) return *reinterpret_cast<const uint32_t*>(at);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (at + i >= begin && at + i < end) word |= uint32_t(at[i]) << 8 * i;
  }
  return word;
}

extern "C" __global__ void pad(uint32_t* to, const uint8_t* from, int rows, int columns,
                               int64_t pitch) {
  const int words = ceil_div(columns, 16) * 4;
  const uint8_t* end = from + (rows - 1) * pitch + columns;
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const uint8_t* start = from + row * pitch;
    const uint32_t bits = reinterpret_cast<uint64_t>(start) % 4 * 8;
    const uint8_t* aligned = start - bits / 8;
#pragma unroll 4
    for (int i = threadIdx.x; i < words; i += blockDim.x) {
      const uint32_t low = load_word(aligned + 4 * i, from, end);
      const uint32_t high = bits ? load_word(aligned + 4 * i + 4, from, end) : 0;
      to[int64_t(row) * words + i] = __funnelshift_r(low, high, bits);
    }
  }
}
