// 32×32 codes of a warp: to floats, from floats, and to memory, as they are and transposed.
//
// A lane has four rows of eight columns: rows 4·(lane/4) … + 3, columns 8·(lane%4) … + 7. So four
// codes of a column, and eight of a row, make words that are written as they are, in whole sectors.
#pragma once

#include "ptx_sm80.cuh"
#include "quantize.cuh"

constexpr int SIDE = 32;           // of a warp's codes
constexpr int TALL = 4, WIDE = 8;  // rows and columns of a lane's codes
constexpr uint32_t ALL = 0xFFFFFFFFu;

// Eight codes. A dot product with one of a word's bytes adds it to the bits of 1.5·2^23. The
// conversion unit has an eighth of the rate, but takes the lowest byte as it is: one of four goes
// there.
DEVICE void to_floats(float (&to)[WIDE], uint2 codes) {
#pragma unroll
  for (int j = 0; j < WIDE; ++j) {
    const int word = j < 4 ? codes.x : codes.y;
    const int sum = __dp4a(word, 1 << j % 4 * 8, __float_as_int(INTEGER));
    if (j % 4) to[j] = __int_as_float(sum) - INTEGER;
    else asm("cvt.rn.f32.s8 %0, %1;" : "=f"(to[j]) : "r"(word));
  }
}

// The low bytes of four words.
DEVICE uint32_t pack(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Random words of eight neighbours in each of four rows, as `philox` makes them: the rounds of the
// rows side by side, so that the key's schedule is counted once. `stream`: one of
// jetfire.reference.philox.
DEVICE void draw(Words (&words)[TALL], uint64_t seed, const int (&rows)[TALL], int column,
                 uint32_t stream = 0) {
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
#pragma unroll
  for (int k = 0; k < TALL; ++k) {
    words[k] = {{uint32_t(column / WIDE), uint32_t(rows[k]), 0, stream}};
  }
#pragma unroll
  for (int round = 0; round < 7; ++round) {
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
      uint32_t(&c)[4] = words[k].w;
      uint32_t low0, high0, low1, high1;
      multiply_wide(c[0], 0xD2511F53u, low0, high0);
      multiply_wide(c[2], 0xCD9E8D57u, low1, high1);
      c[0] = high1 ^ c[1] ^ k0;
      c[2] = high0 ^ c[3] ^ k1;
      c[1] = low1;
      c[3] = low0;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// rint(x·multiplier) as a low byte; the product, rounded once, must be within ±127.
DEVICE uint32_t rounded(float x, float multiplier) {
  return __float_as_uint(__fmaf_rn(x, multiplier, INTEGER));
}

// floor(x·multiplier + u) as a low byte, u the j-th of eight draws; |x·multiplier| must be below
// 127. 128 + u + p lies in [1, 256): rounding it down onto 1.5·2^23 − 128 leaves floor(p + u).
DEVICE uint32_t rounded(float x, float multiplier, const Words& words, int j) {
  const uint32_t u = __byte_perm(words.w[j / 2], 0x4300, j % 2 ? 0x5432 : 0x5410);
  const float sum = __fmaf_rn(x, multiplier, __uint_as_float(u));
  return __float_as_uint(__fadd_rd(sum, INTEGER - 128.0f));
}

// Store a row's eight codes, or the first `columns` of them, not all only if ACCESS is 1 byte.
template <int ACCESS>
DEVICE void store_row(uint8_t* to, uint2 codes, int columns) {
  if constexpr (ACCESS == WIDE) {
    if (columns > 0) *reinterpret_cast<uint2*>(to) = codes;
  } else {
#pragma unroll
    for (int j = 0; j < WIDE; ++j) {
      if (j < columns) to[j] = uint8_t((j < 4 ? codes.x : codes.y) >> j % 4 * 8);
    }
  }
}

// Four rows' words of four columns, as four columns' words of four rows. `exchanged`: the rows come
// in the order 2, 3, 0, 1.
DEVICE void transpose(uint32_t (&to)[4], uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                      bool exchanged) {
  const uint32_t first = exchanged ? 0x1054 : 0x5410, second = exchanged ? 0x3276 : 0x7632;
  const uint32_t low = __byte_perm(a, b, 0x5140), low2 = __byte_perm(c, d, 0x5140);
  const uint32_t high = __byte_perm(a, b, 0x7362), high2 = __byte_perm(c, d, 0x7362);
  to[0] = __byte_perm(low, low2, first), to[1] = __byte_perm(low, low2, second);
  to[2] = __byte_perm(high, high2, first), to[3] = __byte_perm(high, high2, second);
}

// Store a column's four codes, or the first `rows` of them, not all only if ACCESS is 1 byte.
template <int ACCESS>
DEVICE void store_column(uint8_t* to, uint32_t codes, int rows) {
  if constexpr (ACCESS == TALL) {
    if (rows > 0) *reinterpret_cast<uint32_t*>(to) = codes;
  } else {
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
      if (k < rows) to[k] = uint8_t(codes >> k * 8);
    }
  }
}
