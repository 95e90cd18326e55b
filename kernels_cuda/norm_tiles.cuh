// Tiles of 128×128 codes of x and dy, for the two launches of a norm's gradient: norm_sums.cuh and
// norm_gradient.cuh. LayerNorm's if CENTERED, else RMSNorm's.
#pragma once

#include "launches.cuh"
#include "tiles.cuh"

constexpr int SUMS = CENTERED ? 2 : 1;

// Of a row Σg·x̂ and, if CENTERED, Σg, with g = dy·weight; of a column Σdy·x̂ and Σdy.
struct alignas(4 * SUMS) Sums {
  float of[SUMS];
  DEVICE void operator+=(const Sums& other) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) of[i] += other.of[i];
  }
};

struct Arguments {
  TensorMap maps[2];  // of x and dy, in boxes of a tile; if TMA
  TensorMap stream;   // of dsum, in boxes of half a tile; if STREAM_ACCESS is 16
  Matrix inputs[2];   // x and dy
  const float* weight;
  const float* mean;  // if CENTERED
  const float* rstd;
  Sums* row_parts;     // [tiles across, m]
  Sums* column_parts;  // [column_part_count, n]
  const uint64_t* seed;
  const uint16_t* dsum;
  uint16_t* dx;  // dsum's sum with the gradient
  uint8_t* q;
  float* scale;
  uint8_t* qt;
  float* scale_t;
  float* dweight;
  float* dbias;
  int64_t dsum_pitch;
  int32_t m, n, column_part_count;
};

// Tiles that come or have come.
struct Ring {
  uint8_t codes[STAGES][2][TILE * TILE];
  float scales[STAGES][2][PARTS_OF_TILE];
  uint64_t arrived[4];  // one per stage
};
