// The end of a tile: bias, activation, then the cast or the requantisation, and the way to memory.
//
// Written for the accumulator layout that wgmma and mma.sync share. Of a chunk of rows, warp w of
// CHUNK_WARPS has rows 16w…16w+15, and of these lane l has row l/4 in sums 4j and 4j+1, row l/4+8 in
// sums 4j+2 and 4j+3, at columns 8j + 2(l%4) and the next.
#pragma once

#include "config.cuh"
#include "quantize.cuh"

#ifndef CHUNK_WARPS
#define CHUNK_WARPS 4  // a wgmma's warp group
#endif

enum Output { FP32, BF16, FP16, INT8 };

constexpr int ELEMENT_BYTES = OUTPUT == FP32 ? 4 : OUTPUT == INT8 ? 1 : 2;

struct Target {
  void* c;
  const float* bias;
  int8_t* q;
  float* scale;
  int8_t* qt;  // the transposed codes
  float* scale_t;
  const uint64_t* seed;
  int m, n;
};

// What is done to a sum after its bias, in fp32. GELU would go here.
DEVICE float activation(float x) { return x; }

DEVICE int lane_row() { return threadIdx.x / 32 % CHUNK_WARPS * 16 + threadIdx.x % 32 / 4; }
DEVICE int lane_column() { return threadIdx.x % 4 * 2; }

// Row and column, within a chunk, of a thread's sum i.
DEVICE int row_of(int i) { return lane_row() + i / 2 % 2 * 8; }
DEVICE int column_of(int i) { return i / 4 * 8 + lane_column() + i % 2; }

// The biases of a thread's columns; zeros beyond the edge. Two at once from the same distance of one
// address where there are no edges: a guard and an address for each cost five instructions a column.
template <int COLUMNS>
DEVICE void load_bias(float (&bias)[COLUMNS], const Target& to, int column0) {
  if (column0 + 4 * COLUMNS <= to.n && reinterpret_cast<uint64_t>(to.bias) % 8 == 0) {
    const float* from = to.bias + column0 + lane_column();
#pragma unroll
    for (int i = 0; i < COLUMNS; i += 2) {
      const float2 pair = *reinterpret_cast<const float2*>(from + 4 * i);
      bias[i] = pair.x;
      bias[i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      const int column = column0 + column_of(2 * i - i % 2);
      bias[i] = column < to.n ? to.bias[column] : 0.0f;
    }
  }
}

// Make zeros of elements that do not exist.
template <int SUMS>
DEVICE void clear_outside(float (&acc)[SUMS], const Target& to, int row0, int column0) {
  if (row0 + 16 * CHUNK_WARPS <= to.m && column0 + 2 * SUMS <= to.n) return;
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    if (row0 + row_of(i) >= to.m || column0 + column_of(i) >= to.n) acc[i] = 0.0f;
  }
}

template <int SUMS>
DEVICE void add_bias(float (&acc)[SUMS], const Target& to, int column0) {
  float bias[SUMS / 2];
  if (BIAS) load_bias(bias, to, column0);
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    if (BIAS) acc[i] = __fadd_rn(acc[i], bias[i / 4 * 2 + i % 2]);
    acc[i] = activation(acc[i]);
  }
}

// --- floats ------------------------------------------------------------------------------------

DEVICE float load_element(const Target& to, int64_t at) {
  if (OUTPUT == FP32) return static_cast<const float*>(to.c)[at];
  const uint16_t x = static_cast<const uint16_t*>(to.c)[at];
  return OUTPUT == BF16 ? bf16_to_float(x) : fp16_to_float(x);
}

template <int SUMS>
DEVICE void add_held(float (&acc)[SUMS], const Target& to, int row0, int column0) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    const int row = row0 + row_of(i), column = column0 + column_of(i);
    if (row < to.m && column < to.n) {
      acc[i] = __fadd_rn(acc[i], load_element(to, int64_t(row) * to.n + column));
    }
  }
}

// Write Σx² of the warp's 16 rows of a chunk and each 32 columns.
template <int SUMS>
DEVICE void store_squares(float (&acc)[SUMS], float* squares, const Target& to, int row0,
                          int column0) {
  constexpr int EACH = 16;
  const int row = row0 + lane_row() / 16 * 16, lane = threadIdx.x % 32;
  clear_outside(acc, to, row0, column0);
#pragma unroll
  for (int b = 0; b < SUMS / EACH; ++b) {
    float sum = 0.0f;
#pragma unroll
    for (int i = b * EACH; i < (b + 1) * EACH; ++i) sum = __fmaf_rn(acc[i], acc[i], sum);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, step));
    }
    const int column = column0 + 32 * b;
    if (lane == 0 && row < to.m && column < to.n) {
      squares[int64_t(row / 16) * ceil_div(to.n, 32) + column / 32] = sum;
    }
  }
}

DEVICE uint32_t pack(float low, float high) {
  return OUTPUT == BF16 ? pack_bf16(low, high) : pack_fp16(low, high);
}

// From registers: for rows whose pitch the copy engine does not take.
template <int SUMS>
DEVICE void store_direct(const float (&acc)[SUMS], const Target& to, int row0, int column0) {
#pragma unroll
  for (int i = 0; i < SUMS; i += 2) {
    const int row = row0 + row_of(i), column = column0 + column_of(i);
    if (row >= to.m || column >= to.n) continue;
    const int64_t at = int64_t(row) * to.n + column;
    const bool second = column + 1 < to.n;
    if (OUTPUT == FP32) {
      float* c = static_cast<float*>(to.c) + at;
      c[0] = acc[i];
      if (second) c[1] = acc[i + 1];
    } else {
      uint16_t* c = static_cast<uint16_t*>(to.c) + at;
      const uint32_t both = pack(acc[i], acc[i + 1]);
      if (to.n % 2 == 0 && reinterpret_cast<uint64_t>(to.c) % 4 == 0) {
        *reinterpret_cast<uint32_t*>(c) = both;
      } else {
        c[0] = uint16_t(both);
        if (second) c[1] = uint16_t(both >> 16);
      }
    }
  }
}

// --- codes -------------------------------------------------------------------------------------

// The largest |x| of each of a chunk's blocks that this warp has a share of, as bits: those of NaN
// are above all others. Elements that do not exist become zeros first.
template <int SUMS, int BLOCKS>
DEVICE void warp_amax(float (&acc)[SUMS], uint32_t (&amax)[BLOCKS], const Target& to, int row0,
                      int column0) {
  clear_outside(acc, to, row0, column0);
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    constexpr int EACH = SUMS / BLOCKS;
    uint32_t most = 0;
#pragma unroll
    for (int i = b * EACH; i < (b + 1) * EACH; i += 4) {
      // Bits order like the floats and NaN above all, which max.NaN never leaves a sign: of three
      // integers one instruction of sm_90's finds the largest.
      const uint32_t left = __float_as_uint(max_nan(fabsf(acc[i]), fabsf(acc[i + 1])));
      const uint32_t right = __float_as_uint(max_nan(fabsf(acc[i + 2]), fabsf(acc[i + 3])));
      most = max(max(left, right), most);
    }
    amax[b] = __reduce_max_sync(0xFFFFFFFFu, most);
  }
}

// Zeros for blocks that multiply by 0, which NaN and infinity, having no low bits to speak of, would
// otherwise survive. One branch a chunk, hardly ever taken, is cheaper than a choice for each code.
template <int SUMS, int BLOCKS>
DEVICE void clear_unusable(float (&acc)[SUMS], const float (&multiplier)[BLOCKS]) {
  float least = multiplier[0];
#pragma unroll
  for (int b = 1; b < BLOCKS; ++b) least = fminf(least, multiplier[b]);
  if (least > 0.0f) return;
#pragma unroll
  for (int i = 0; i < SUMS; ++i) acc[i] = multiplier[i * BLOCKS / SUMS] == 0.0f ? 0.0f : acc[i];
}

// Sums times their blocks' multipliers, where those of 0 leave 0. Of a block whose bit of `over` is
// set they are held to -127: a quarter of all, so that a branch for each is cheaper than to hold all.
template <int SUMS, int BLOCKS>
DEVICE void multiply_blocks(float (&acc)[SUMS], const float (&multiplier)[BLOCKS], uint32_t over) {
  if (STOCHASTIC || !CONVERTS_PAIRS) clear_unusable(acc, multiplier);
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    constexpr int EACH = SUMS / BLOCKS;
#pragma unroll
    for (int i = b * EACH; i < (b + 1) * EACH; ++i) acc[i] = __fmul_rn(acc[i], multiplier[b]);
    if (!STOCHASTIC || !(over >> b & 1)) continue;
#pragma unroll
    for (int i = b * EACH; i < (b + 1) * EACH; ++i) acc[i] = fmaxf(acc[i], -127.0f);
  }
}

// Draws random words for four groups of eight columns, of rows l/4 and l/4 + 8: each of four lanes
// draws for one group and hands the others their words.
struct Draw {
  uint64_t seed;
  int row0;

  DEVICE void operator()(Words (&bits)[2], int group0) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t group = group0 + threadIdx.x % 4;
      bits[half] = philox(seed, group, row0 + lane_row() + 8 * half);
      transpose_words(bits[half]);
    }
  }
};

// Two codes a word, in its bytes 0 and 1, for each pair of products.
template <int SUMS, class Draw>
DEVICE void to_codes(const float (&product)[SUMS], uint16_t (&codes)[SUMS / 2], const Draw& draw,
                     int column0) {
  Words bits[2];
#pragma unroll
  for (int j = 0; j < SUMS / 4; ++j) {
    if (STOCHASTIC && j % 4 == 0) draw(bits, column0 / 8 + j);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 4 * j + 2 * half;
      if (!STOCHASTIC && CONVERTS_PAIRS) {
        codes[i / 2] = uint16_t(codes_nearest(product[i], product[i + 1]));
        continue;
      }
      const uint32_t word = bits[half].w[j % 4];
      const uint32_t low = STOCHASTIC ? code_stochastic(product[i], word, false)
                                      : code_nearest(product[i]);
      const uint32_t high = STOCHASTIC ? code_stochastic(product[i + 1], word, true)
                                       : code_nearest(product[i + 1]);
      codes[i / 2] = uint16_t(__byte_perm(low, high, 0x0040));
    }
  }
}

template <int PAIRS>
DEVICE void store_codes_direct(const uint16_t (&codes)[PAIRS], const Target& to, int row0,
                               int column0) {
#pragma unroll
  for (int i = 0; i < 2 * PAIRS; ++i) {
    const int row = row0 + row_of(i), column = column0 + column_of(i);
    if (row < to.m && column < to.n) {
      to.q[int64_t(row) * to.n + column] = int8_t(codes[i / 2] >> i % 2 * 8);
    }
  }
}

template <int PAIRS>
DEVICE void store_qt_direct(const uint16_t (&codes)[PAIRS], const Target& to, int row0,
                            int column0) {
#pragma unroll
  for (int i = 0; i < 2 * PAIRS; ++i) {
    const int row = row0 + row_of(i), column = column0 + column_of(i);
    if (row < to.m && column < to.n) {
      to.qt[int64_t(column) * to.m + row] = int8_t(codes[i / 2] >> i % 2 * 8);
    }
  }
}

// One block's scale, to wherever it goes.
DEVICE void store_scale(float scale, const Target& to, int row, int column) {
  if (row >= to.m || column >= to.n) return;
  const int down = row / OUT_BLOCK, across = column / OUT_BLOCK;
  if (Q) to.scale[int64_t(down) * ceil_div(to.n, OUT_BLOCK) + across] = scale;
  if (QT) to.scale_t[int64_t(across) * ceil_div(to.m, OUT_BLOCK) + down] = scale;
}
