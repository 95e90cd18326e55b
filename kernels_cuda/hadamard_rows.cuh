// Rows in tiles, and the Hadamard transform of a tile: what both directions of the quantiser share.
//
// `LANES` threads walk a row. Of each tile a thread has `CHUNKS` runs of `ELEMENTS` neighbours: its
// element (c, j) is the tile's column (c·LANES + lane)·ELEMENTS + j. So of the stages of a group
// those below ELEMENTS are a thread's own, those below LANES·ELEMENTS are between lanes, and the
// rest between runs.
#pragma once

#include "config.cuh"
#include "quantize.cuh"

constexpr int RUN = LANES * ELEMENTS;  // from one run of a thread to its next
constexpr int TILE = RUN * CHUNKS;
constexpr int ROWS = 32 * WARPS / LANES;  // of a block
constexpr int BF16 = 0, FP16 = 1, FP32 = 2;
static_assert(GROUP <= TILE, "a group lies within a tile");

using Values = float[CHUNKS][ELEMENTS];

DEVICE constexpr int bits_of(int type) { return type == FP32 ? 32 : 16; }

template <int BITS>
using Raw = uint32_t[CHUNKS][ELEMENTS * BITS / 32];

// Have a row's address be made once, and not anew for each tile: up to two instructions an element.
template <class T>
DEVICE void keep(const T*& row) {
  asm volatile("" : "+l"(row));
}

template <int BYTES>
DEVICE void load_piece(uint32_t* to, int at, const uint8_t* from) {
  if constexpr (BYTES == 16) {
    const uint4 x = __ldg(reinterpret_cast<const uint4*>(from));
    to[at / 4] = x.x, to[at / 4 + 1] = x.y, to[at / 4 + 2] = x.z, to[at / 4 + 3] = x.w;
  } else if constexpr (BYTES == 8) {
    const uint2 x = __ldg(reinterpret_cast<const uint2*>(from));
    to[at / 4] = x.x, to[at / 4 + 1] = x.y;
  } else if constexpr (BYTES == 4) {
    to[at / 4] = __ldg(reinterpret_cast<const uint32_t*>(from));
  } else if constexpr (BYTES == 2) {
    to[at / 4] |= uint32_t(__ldg(reinterpret_cast<const uint16_t*>(from))) << at % 4 * 8;
  } else {
    to[at / 4] |= uint32_t(__ldg(from)) << at % 4 * 8;
  }
}

template <int BYTES>
DEVICE void store_piece(uint8_t* to, const uint32_t* from, int at) {
  const uint32_t* w = from + at / 4;
  if constexpr (BYTES == 16) {
    *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
  } else if constexpr (BYTES == 8) {
    *reinterpret_cast<uint2*>(to) = make_uint2(w[0], w[1]);
  } else if constexpr (BYTES == 4) {
    *reinterpret_cast<uint32_t*>(to) = w[0];
  } else if constexpr (BYTES == 2) {
    *reinterpret_cast<uint16_t*>(to) = uint16_t(w[0] >> at % 4 * 8);
  } else {
    *to = uint8_t(w[0] >> at % 4 * 8);
  }
}

// A thread's elements of a tile, BITS each, in pieces of BYTES, each of which lies whole within a
// row's columns or past them, and is zeros there. `column` is the thread's first, `row` the row's
// first byte.
template <int BITS, int BYTES>
DEVICE void load(Raw<BITS>& to, const uint8_t* row, int column, int columns) {
  const uint8_t* from = row + int64_t(column) * BITS / 8;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < ELEMENTS * BITS / 32; ++i) to[c][i] = 0;
#pragma unroll
    for (int at = 0; at < ELEMENTS * BITS / 8; at += BYTES) {
      if (column + c * RUN + at * 8 / BITS < columns) {
        load_piece<BYTES>(to[c], at, from + c * RUN * BITS / 8 + at);
      }
    }
  }
}

// One run of a thread's elements, from their first column on.
template <int BITS, int BYTES>
DEVICE void store(uint8_t* row, const uint32_t (&from)[ELEMENTS * BITS / 32], int column,
                  int columns) {
  uint8_t* to = row + int64_t(column) * BITS / 8;
#pragma unroll
  for (int at = 0; at < ELEMENTS * BITS / 8; at += BYTES) {
    if (column + at * 8 / BITS < columns) store_piece<BYTES>(to + at, from, at);
  }
}

// Element j of a run.
template <int TYPE>
DEVICE float unpack(const uint32_t* run, int j) {
  if constexpr (TYPE == FP32) {
    return __uint_as_float(run[j]);
  } else if constexpr (TYPE == FP16) {
    return fp16_to_float(uint16_t(run[j / 2] >> j % 2 * 16));
  } else {
    return __uint_as_float(j % 2 ? run[j / 2] & 0xFFFF0000u : run[j / 2] << 16);
  }
}

template <int TYPE>
DEVICE void pack(uint32_t (&run)[ELEMENTS * bits_of(TYPE) / 32], const float (&x)[ELEMENTS]) {
#pragma unroll
  for (int i = 0; i < ELEMENTS * bits_of(TYPE) / 32; ++i) {
    if constexpr (TYPE == FP32) {
      run[i] = __float_as_uint(x[i]);
    } else {
      run[i] = TYPE == FP16 ? pack_fp16(x[2 * i], x[2 * i + 1]) : pack_bf16(x[2 * i], x[2 * i + 1]);
    }
  }
}

// Stages H, 2H, …, GROUP/2: (a, b) becomes (a + b, a − b), each rounded once. Between lanes that is
// ±own + other, the product exact.
template <int H = 1>
DEVICE void butterflies(Values& v, int lane) {
  if constexpr (H < GROUP) {
    constexpr int LANE_STEP = H < RUN ? H / ELEMENTS : 0;
    const float sign = LANE_STEP && (lane & LANE_STEP) ? -1.0f : 1.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
      for (int j = 0; j < ELEMENTS; ++j) {
        if constexpr (LANE_STEP > 0) {
          const float other = __shfl_xor_sync(0xFFFFFFFFu, v[c][j], LANE_STEP);
          v[c][j] = __fmaf_rn(v[c][j], sign, other);
        } else {
          const int place = c * RUN + j;  // less the lane's part, which these stages do not touch
          if (place & H) continue;
          float& a = v[c][j];
          float& b = v[(place + H) / RUN][(place + H) % RUN];
          const float sum = __fadd_rn(a, b);
          b = __fsub_rn(a, b);
          a = sum;
        }
      }
    }
    butterflies<2 * H>(v, lane);
  }
}

// The sum over a row's threads, for each of them.
template <class T>
DEVICE T sum_of_row(T x) {
#pragma unroll
  for (int step = 1; step < LANES; step *= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
  return x;
}

// (1/√GROUP)/step, or 0 where that is not finite and above 0.
DEVICE float multiplier(float step) {
  const float inverse = __fdiv_rn(__int_as_float(FACTOR_BITS), step);
  return inverse > 0 && inverse < __int_as_float(0x7F800000) ? inverse : 0.0f;
}

// clamp(v, −8, 7) + INTEGER, rounded to nearest, ties to even; NaN gives −8.
DEVICE float code(float v) { return __fadd_rn(fminf(fmaxf(v, -8.0f), 7.0f), INTEGER); }

// The low bytes of four codes.
DEVICE uint32_t bytes_of(const float* v, float inverse) {
  uint32_t k[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) k[i] = __float_as_uint(code(__fmul_rn(v[i], inverse)));
  return __byte_perm(__byte_perm(k[0], k[1], 0x0040), __byte_perm(k[2], k[3], 0x0040), 0x5410);
}

// The low nibbles of eight bytes, the first lowest.
DEVICE uint32_t nibbles_of(uint32_t low, uint32_t high) {
  const uint32_t a = (low & 0x0F0F0F0Fu) | (low >> 4 & 0xF0F0F0F0u);
  const uint32_t b = (high & 0x0F0F0F0Fu) | (high >> 4 & 0xF0F0F0F0u);
  return __byte_perm(a, b, 0x6420);  // each pair is in its first byte
}
