// What a norm's gradient has to add up over rows and columns, as parts.
//
// A block goes down a strip of 128 columns, every gridDim.x/strips-th tile. Sums over columns stay
// in registers from tile to tile, and the block writes them once; sums over a tile's rows it writes
// at each turn. So a warp's parts lie below one another.
#pragma once

#include "norm_tiles.cuh"

struct Statistics {
  float mean, rstd;
};

struct Shared {
  Ring ring;
  Statistics rows[STAGES][TILE];
  Sums sums[ACROSS][TILE];  // of rows over 32 columns each; at the end of columns
};
static_assert(sizeof(Shared) == SHARED_BYTES, "as the host counts them");

DEVICE void fetch(Shared& shared, int stage, int row0, int column0, const Arguments& p) {
  const int i = threadIdx.x, row = row0 + i;
  if (i < TILE) {
    auto& to = shared.rows[stage][i];
    if (CENTERED) copy_float(to.mean, p.mean, row, row < p.m);
    copy_float(to.rstd, p.rstd, row, row < p.m);
  }
  fetch_codes(shared.ring, stage, row0, column0, p);
}

// Among lanes that differ in bits FIRST, 2·FIRST, …: of COUNT sums, the lane with index i in these
// bits gets all lanes' sum of element i.
template <int FIRST, int COUNT>
DEVICE float share(float (&x)[COUNT], int index) {
#pragma unroll
  for (int left = COUNT / 2, bit = 1; left > 0; left /= 2, bit *= 2) {
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const bool odd = index & bit;
      const float sent = odd ? x[2 * i] : x[2 * i + 1];
      const float kept = odd ? x[2 * i + 1] : x[2 * i];
      x[i] = kept + __shfl_xor_sync(ALL, sent, FIRST * bit);
    }
  }
  return x[0];
}

// A lane's sums over the rows of all parts below one another, of its eight columns.
struct ColumnSums {
  float dweight[WIDE] = {}, dbias[WIDE] = {};
};

// Add a part's sums over rows to `of_columns`; return those over its columns, of the lane's row
// with index % 4. Scales come last, so that no step is out of range where x̂ and dy are not.
DEVICE Sums add(ColumnSums& of_columns, const Tile& tile, const Statistics* rows, int part,
                const float (&weight)[WIDE], const Lane& lane) {
  const float x_scale = tile.scale(0, part), dy_scale = tile.scale(1, part);
  float along[TALL], plain[TALL], dweight[WIDE], dbias[WIDE];
#pragma unroll
  for (int k = 0; k < TALL; ++k) {
    float x[WIDE], dy[WIDE], g = 0, gx = 0;
    to_floats(x, lane.codes(tile, 0, part, k));
    to_floats(dy, lane.codes(tile, 1, part, k));
    const auto [mean, rstd] = rows[row_of(part) + lane.row_at(k)];
    const float step = x_scale * rstd, shift = CENTERED ? mean * rstd : 0.0f;
#pragma unroll
    for (int j = 0; j < WIDE; ++j) {
      // dy·x̂, or without its scales.
      const float product = dy[j] * (CENTERED ? fmaf(x[j], step, -shift) : x[j]);
      g = j ? fmaf(dy[j], weight[j], g) : dy[j] * weight[j];
      gx = j ? fmaf(product, weight[j], gx) : product * weight[j];
      const float of_column = CENTERED ? product : product * rstd;
      dweight[j] = k ? dweight[j] + of_column : of_column;
      dbias[j] = k ? dbias[j] + dy[j] : dy[j];
    }
    along[k] = (CENTERED ? gx : gx * step) * dy_scale;
    plain[k] = g * dy_scale;
  }
#pragma unroll
  for (int j = 0; j < WIDE; ++j) {
    const float scaled = CENTERED ? dweight[j] : dweight[j] * x_scale;
    of_columns.dweight[j] = fmaf(scaled, dy_scale, of_columns.dweight[j]);
    if (CENTERED) of_columns.dbias[j] = fmaf(dbias[j], dy_scale, of_columns.dbias[j]);
  }
  Sums sums;
  sums.of[0] = share<1>(along, lane.index);
  if constexpr (CENTERED) sums.of[1] = share<1>(plain, lane.index);
  return sums;
}

// Of row or column i of the tile, what the first `count` of 4 places have.
DEVICE Sums total(const Shared& shared, int i, int count) {
  Sums sums = shared.sums[0][i];
#pragma unroll
  for (int j = 1; j < count; ++j) sums += shared.sums[j][i];
  return sums;
}

// Write what the block's warps have of the strip's columns.
DEVICE void store_columns(Shared& shared, ColumnSums& of_columns, int column0, int block,
                          const Arguments& p, const Lane& lane) {
  const int column = lane.warp % ACROSS * SIDE + lane.column + lane.index / 4;
  __syncthreads();  // the last sums over rows have been read
  Sums& to = shared.sums[lane.warp / ACROSS][column];
  to.of[0] = share<4>(of_columns.dweight, lane.index / 4);
  if constexpr (CENTERED) to.of[1] = share<4>(of_columns.dbias, lane.index / 4);
  __syncthreads();
  const int i = threadIdx.x;
  if (i >= TILE || column0 + i >= p.n) return;
  p.column_parts[int64_t(block) * p.n + column0 + i] = total(shared, i, WARPS / ACROSS);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    sums(const __grid_constant__ Arguments p) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) start_next();
  const Lane lane;
  const int strips = ceil_div(p.n, TILE), strip = blockIdx.x % strips, column0 = strip * TILE;
  const int down = ceil_div(p.m, TILE), block = blockIdx.x / strips, step = gridDim.x / strips;
  prepare(shared.ring);
  int ahead = block;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i, ahead += step) {
    if (ahead < down) fetch(shared, i, ahead * TILE, column0, p);
    copy_commit();
  }
  float weight[WIDE];
#pragma unroll
  for (int j = 0; j < WIDE; ++j) {
    const int column = column0 + lane.warp % ACROSS * SIDE + lane.column + j;
    weight[j] = column < p.n ? p.weight[column] : 0.0f;
  }
  ColumnSums of_columns;
  int stage = 0;
  uint32_t lap = 0;
#pragma unroll 1
  for (int row = block; row < down; row += step, ahead += step) {
    wait(shared.ring, stage, lap);
    if (ahead < down) fetch(shared, stage ? stage - 1 : STAGES - 1, ahead * TILE, column0, p);
    copy_commit();
    const Tile tile(shared.ring, stage);
#pragma unroll 1
    for (int i = 0; i < PARTS; ++i) {
      const int part = (lane.warp / ACROSS * PARTS + i) * ACROSS + lane.warp % ACROSS;
      const int of = row_of(part) + lane.row_at(lane.index % 4);
      shared.sums[part % ACROSS][of] =
          add(of_columns, tile, shared.rows[stage], part, weight, lane);
    }
    __syncthreads();
    const int i = threadIdx.x;
    if (i < TILE && row * TILE + i < p.m) {
      p.row_parts[int64_t(strip) * p.m + row * TILE + i] = total(shared, i, ACROSS);
    }
    if (++stage == STAGES) stage = 0, ++lap;
  }
  store_columns(shared, of_columns, column0, block, p, lane);
}
