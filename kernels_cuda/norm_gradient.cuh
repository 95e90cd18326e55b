// A norm's gradient, quantised, from what norm_sums.cuh added up.
//
// A block has tiles that follow one another along rows, so that it adds up the parts of a row's
// sums once. Its blocks start as those of norm_sums.cuh end, and fetch their first tiles meanwhile.
// Before these have come, blocks add up the parts of columns' sums. If RESIDUAL the gradient joins
// that of the residual stream: the sum is rounded to bf16, written, and quantised as it was rounded.
#pragma once

#include "norm_tiles.cuh"
#include "tile_codes.cuh"

// A number as two factors, each about the size of its square root. A value that is multiplied by one
// and then by the other passes through nothing larger or smaller than what it begins and ends as.
struct Factors {
  float first, second;
};

// dx = dy·weight·rstd + x·slope + offset.
struct alignas(16) Row {
  float rstd, offset;
  Factors slope;
};

struct Shared {
  Ring ring;
  float weight[STAGES][TILE];
  Row rows[TILE];
  Sums columns[WARPS][SIDE];
  uint32_t most[PARTS_OF_TILE];  // the bits of parts' largest values
};
static_assert(sizeof(Shared) == SHARED_BYTES, "as the host counts them");

// --- loading -------------------------------------------------------------------------------------

// Have L2 fetch a box of a matrix.
DEVICE void tma_prefetch(const TensorMap& map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];"
               ::"l"(&map), "r"(x), "r"(y) : "memory");
}

DEVICE void fetch(Shared& shared, int stage, int row0, int column0, const Arguments& p) {
  const int i = threadIdx.x, column = column0 + i;
  if (i < TILE) copy_float(shared.weight[stage][i], p.weight, column, column < p.n);
  fetch_codes(shared.ring, stage, row0, column0, p);
  if constexpr (RESIDUAL && STREAM_ACCESS == 16) {
    constexpr int HALF = TILE / 2;
    if (i == 0) tma_prefetch(p.stream, column0, row0);
    if (i == 0 && column0 + HALF < p.n) tma_prefetch(p.stream, column0 + HALF, row0);
  }
}

// --- sums ----------------------------------------------------------------------------------------

// Return the factors of a number, of which the first is a power of two.
DEVICE Factors factors(double x) {
  // Exponents are stored with 1023 added in fp64, with 127 in fp32. Half of x's, within fp32's range:
  const int exponent = __double2hiint(x) & 0x7ff00000;
  const int half = min(max((exponent - (769 << 20)) >> 21, 1), 254);
  const double inverse = __hiloint2double((1150 - half) << 20, 0);
  return {__int_as_float(half << 23), float(x * inverse)};
}

// Add up the parts of the sums of a tile's rows, a few threads per row.
DEVICE void add_rows(Shared& shared, int row0, const Arguments& p) {
  constexpr int SLICES = THREADS / TILE;
  const int i = threadIdx.x / SLICES, row = row0 + i, parts = ceil_div(p.n, TILE);
  Sums even = {}, odd = {};
  if (row < p.m) {
#pragma unroll 4
    for (int j = threadIdx.x % SLICES; j < parts; j += 2 * SLICES) {
      even += p.row_parts[int64_t(j) * p.m + row];
      if (j + SLICES < parts) odd += p.row_parts[int64_t(j + SLICES) * p.m + row];
    }
  }
  even += odd;
#pragma unroll
  for (int step = 1; step < SLICES; step *= 2) {
#pragma unroll
    for (int k = 0; k < SUMS; ++k) even.of[k] += __shfl_xor_sync(ALL, even.of[k], step);
  }
  if (threadIdx.x % SLICES) return;
  const float rstd = row < p.m ? p.rstd[row] : 0.0f, inverse = 1.0f / float(p.n);
  const Factors slope = factors(-(even.of[0] * inverse) * double(rstd) * rstd);
  float offset = 0;
  if (CENTERED) {
    const float mean = row < p.m ? p.mean[row] : 0.0f, plain = even.of[SUMS - 1] * inverse;
    offset = fmaf(-mean * slope.first, slope.second, -plain * rstd);
  }
  shared.rows[i] = {rstd, offset, slope};
}

// Add up the parts of the sums of 32 columns, a slice of them per warp.
DEVICE void add_columns(Shared& shared, const Arguments& p, const Lane& lane) {
  for (int column0 = blockIdx.x * SIDE; column0 < p.n; column0 += gridDim.x * SIDE) {
    const int column = column0 + lane.index;
    Sums sums = {};
    if (column < p.n) {
#pragma unroll 4
      for (int i = lane.warp; i < p.column_part_count; i += WARPS) {
        sums += p.column_parts[int64_t(i) * p.n + column];
      }
    }
    shared.columns[lane.warp][lane.index] = sums;
    __syncthreads();
    if (lane.warp == 0 && column < p.n) {
#pragma unroll
      for (int i = 1; i < WARPS; ++i) sums += shared.columns[i][lane.index];
      p.dweight[column] = sums.of[0];
      if (CENTERED) p.dbias[column] = sums.of[SUMS - 1];
    }
    __syncthreads();
  }
}

// --- a part --------------------------------------------------------------------------------------

// A lane's values of dx, fp32.
struct Values {
  float values[TALL][WIDE];
  float most = 0;

  DEVICE void begin(int, int, const Arguments&, const Lane&) {}

  DEVICE void take(int k, const float (&dx)[WIDE]) {
#pragma unroll
    for (int j = 0; j < WIDE; ++j) {
      values[k][j] = dx[j];
      most = max_nan(most, fabsf(dx[j]));
    }
  }

  DEVICE float at(int k, int j) const { return values[k][j]; }
  DEVICE uint32_t largest() const { return __float_as_uint(most); }
  DEVICE void end(int, int, const Arguments&, const Lane&) const {}
};

// A lane's values of dsum, and then of its sum with dx, bf16.
struct Stream : Pairs {
  uint32_t most = 0;

  DEVICE void begin(int row0, int column0, const Arguments& p, const Lane& lane) {
    const int column = column0 + lane.column;
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
      const int row = row0 + lane.row_at(k);
      const int columns = row < p.m ? p.n - column : 0;
      const uint16_t* from = p.dsum + row * p.dsum_pitch + column;
      if constexpr (STREAM_ACCESS == 16) {
        const uint4 x = columns > 0 ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
        pairs[k][0] = x.x, pairs[k][1] = x.y, pairs[k][2] = x.z, pairs[k][3] = x.w;
      } else {
#pragma unroll
        for (int j = 0; j < WIDE; j += 2) {
          const uint32_t low = j < columns ? from[j] : 0, high = j + 1 < columns ? from[j + 1] : 0;
          pairs[k][j / 2] = low | high << 16;
        }
      }
    }
  }

  DEVICE void take(int k, const float (&dx)[WIDE]) {
#pragma unroll
    for (int j = 0; j < WIDE; j += 2) {
      uint32_t& pair = pairs[k][j / 2];
      pair = pack_bf16(low_bf16(pair) + dx[j], high_bf16(pair) + dx[j + 1]);
      most = max_magnitudes(most, pair);
    }
  }

  DEVICE uint32_t largest() const { return larger_magnitude(most); }

  DEVICE void end(int row0, int column0, const Arguments& p, const Lane& lane) const {
    const int column = column0 + lane.column;
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
      const int row = row0 + lane.row_at(k);
      const int columns = row < p.m ? p.n - column : 0;
      uint16_t* to = p.dx + int64_t(row) * p.n + column;
      if constexpr (STREAM_ACCESS == 16) {
        const auto [a, b, c, d] = pairs[k];
        if (columns > 0) *reinterpret_cast<uint4*>(to) = {a, b, c, d};
      } else {
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
          if (j < columns) to[j] = uint16_t(pairs[k][j / 2] >> j % 2 * 16);
        }
      }
    }
  }
};

template <bool>
struct HeldAs {
  using Type = Values;
};
template <>
struct HeldAs<true> {
  using Type = Stream;
};
using Part = HeldAs<RESIDUAL>::Type;

// Return ∞ as the largest number, so that a code of 0 times it is 0.
DEVICE float finite(float x) { return x > LARGEST ? LARGEST : x; }

// Take a part's dx; return the bits of the largest |value|.
DEVICE uint32_t read(Part& to, const Shared& shared, int stage, int part, int row0, int column0,
                     const Arguments& p, const Lane& lane) {
  const Tile tile(shared.ring, stage);
  const float x_scale = tile.scale(0, part);
  float dy_scale = tile.scale(1, part);
  // dy_scale·rstd may overflow where dy_scale·rstd·weight does not: weights get 2^64 of a large scale.
  const float shift = dy_scale > 0x1p64f ? 0x1p64f : 1.0f;
  dy_scale *= dy_scale > 0x1p64f ? 0x1p-64f : 1.0f;
  to.begin(row0, column0, p, lane);
  float weight[WIDE];
#pragma unroll
  for (int j = 0; j < WIDE; j += 4) {
    const float* from = shared.weight[stage] + column_of(part) + lane.column + j;
    const float4 w = *reinterpret_cast<const float4*>(from);
    weight[j] = w.x * shift, weight[j + 1] = w.y * shift;
    weight[j + 2] = w.z * shift, weight[j + 3] = w.w * shift;
  }
  const int columns = p.n - column0 - lane.column;
#pragma unroll
  for (int k = 0; k < TALL; ++k) {
    float x[WIDE], dy[WIDE], dx[WIDE];
    to_floats(x, lane.codes(tile, 0, part, k));
    to_floats(dy, lane.codes(tile, 1, part, k));
    Row row = shared.rows[row_of(part) + lane.row_at(k)];
    // What lies beyond the matrix would hold the offset.
    if (columns <= 0) row.offset = 0;
    const float of_dy = dy_scale * row.rstd;
    const float of_x = finite(x_scale * row.slope.first);
#pragma unroll
    for (int j = 0; j < WIDE; ++j) {
      // By one finite factor, then the other: a code of 0 makes 0 where the slope is infinite.
      const float part = x[j] * of_x, last = row.slope.second;
      const float rest = CENTERED ? fmaf(part, last, row.offset) : part * last;
      dx[j] = fmaf(dy[j] * weight[j], of_dy, rest);
      if (CENTERED && !WHOLE_LANES && j >= columns) dx[j] = 0;
    }
    to.take(k, dx);
  }
  to.end(row0, column0, p, lane);
  return __reduce_max_sync(ALL, to.largest());
}

// --- a tile --------------------------------------------------------------------------------------

DEVICE void turn(Shared& shared, int stage, int row0, int column0, uint64_t seed,
                 const Arguments& p, const Lane& lane) {
#pragma unroll 1
  for (int begin = 0; begin < PARTS; begin += HELD) {
    const int part = lane.warp * PARTS + begin;
    const int row = row0 + row_of(part), column = column0 + column_of(part);
    Part held[HELD];
    uint32_t most[HELD];
#pragma unroll
    for (int b = 0; b < HELD; ++b) {
      most[b] = read(held[b], shared, stage, part + b, row, column + b * SIDE, p, lane);
    }
    store_parts<false>(held, most, shared.most, part, row, column, seed, p, lane);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    gradient(const __grid_constant__ Arguments p) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  // L1 may hold lines from before the first launch's inputs were written: the fence drops them.
  __threadfence();
  const Lane lane;
  const uint64_t seed = STOCHASTIC ? *p.seed : 0;
  const int across = ceil_div(p.n, TILE);
  const int64_t tiles = int64_t(ceil_div(p.m, TILE)) * across;
  const int64_t first = tiles * blockIdx.x / gridDim.x, end = tiles * (blockIdx.x + 1) / gridDim.x;
  int row = int(first / across), column = int(first % across), before = -1;
  int ahead_row = row, ahead_column = column, ahead = int(end - first);
  auto fetch_ahead = [&](int stage) {
    if (ahead-- > 0) fetch(shared, stage, ahead_row * TILE, ahead_column * TILE, p);
    copy_commit();
    if (++ahead_column == across) ahead_column = 0, ++ahead_row;
  };
  prepare(shared.ring);
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) fetch_ahead(i);
  wait_for_previous();
  add_columns(shared, p, lane);
  int stage = 0;
  uint32_t lap = 0;
#pragma unroll 1
  for (int left = int(end - first); left > 0; --left) {
    if (row != before) {
      __syncthreads();  // all are done with the rows before
      add_rows(shared, row * TILE, p);
      before = row;
    }
    wait(shared.ring, stage, lap);
    fetch_ahead(stage ? stage - 1 : STAGES - 1);
    turn(shared, stage, row * TILE, column * TILE, seed, p, lane);
    if (++stage == STAGES) stage = 0, ++lap;
    if (++column == across) column = 0, ++row;
  }
}
