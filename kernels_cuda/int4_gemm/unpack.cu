// Copies rows into aligned rows of a multiple of 16 bytes, which the tensor memory accelerator wants,
// and with PACKED turns nibbles into wide codes on the way: a word's four low ones and then its four
// high ones. Both operands of a product are cut alike, so that their order is no matter.
#include "config.cuh"
#include "ptx.cuh"

constexpr int READ = PACKED ? 8 : 16;  // bytes that make 16

// Up to four bytes of a row, the rest zeros.
DEVICE uint32_t load_word(const uint8_t* row, int at, int bytes, bool aligned) {
  if (aligned && at + 4 <= bytes) return *reinterpret_cast<const uint32_t*>(row + at);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (at + i < bytes) word |= uint32_t(row[at + i]) << 8 * i;
  }
  return word;
}

template <int WORDS>
DEVICE void load_words(uint32_t (&words)[WORDS], const uint8_t* row, int at, int bytes) {
  const uint64_t start = reinterpret_cast<uint64_t>(row + at);
  if (WORDS == 2 && start % 8 == 0 && at + 8 <= bytes) {
    const uint2 both = *reinterpret_cast<const uint2*>(row + at);
    words[0] = both.x, words[1] = both.y;
    return;
  }
#pragma unroll
  for (int i = 0; i < WORDS; ++i) words[i] = load_word(row, at + 4 * i, bytes, start % 4 == 0);
}

extern "C" __global__ void unpack(uint4* to, const uint8_t* from, int rows, int bytes,
                                  int64_t pitch) {
  const uint32_t chunks = ceil_div(bytes, READ);
  const int64_t all = int64_t(rows) * chunks, stride = int64_t(gridDim.x) * blockDim.x;
#pragma unroll 4
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < all; i += stride) {
    const uint32_t row = uint64_t(i) < 0x100000000u ? uint32_t(i) / chunks : i / chunks;
    const int at = int(i - int64_t(row) * chunks) * READ;
    uint32_t x[READ / 4];
    load_words(x, from + row * pitch, at, bytes);
    if constexpr (PACKED) {
      constexpr uint32_t HIGHS = 0xF0F0F0F0u;
      to[i] = {x[0] << 4 & HIGHS, x[0] & HIGHS, x[1] << 4 & HIGHS, x[1] & HIGHS};
    } else {
      to[i] = {x[0], x[1], x[2], x[3]};
    }
  }
}
