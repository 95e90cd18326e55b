// The gradient of a norm from one reading of x and dy: LayerNorm's if CENTERED, else RMSNorm's.
//
// A cluster of CLUSTER blocks has whole rows, COLUMNS columns a block, and goes over tiles of 32
// rows, one turn each, while the next tiles are on their way to shared memory:
//   1. sum:      each warp goes over its 64 columns of codes, for the sums over rows and columns.
//   2. exchange: sums over rows go to every block of the cluster.
//   3. write:    the warp goes over its codes again, and writes dx in blocks of 32.
// Sums over columns stay in registers from turn to turn; at the end the cluster writes its own,
// which norm_column_sums.cu adds up.
//
// A warp's two blocks of a tile are 32×32 codes each. Of one a lane has four rows of eight columns:
// rows 4·(lane/4) … + 3, columns 8·(lane%4) … + 7. So four codes of a column, and eight of a row,
// make words that are written as they are, in whole sectors; a row's sums are over four lanes.
#pragma once

#include "config.cuh"
#include "ptx_sm80.cuh"
#include "quantize.cuh"

constexpr int SIDE = 32;                    // rows of a tile, and a side of dx's blocks
constexpr int ACROSS = 2;                   // blocks of a warp
constexpr int WARPS = COLUMNS / (ACROSS * SIDE), THREADS = 32 * WARPS;
constexpr int TALL = 4, WIDE = 8;           // rows and columns of a lane's codes
constexpr uint32_t ALL = 0xFFFFFFFFu;

struct Arguments {
  const uint8_t* x;
  const float* x_scale;
  const uint8_t* dy;
  const float* dy_scale;
  const float* weight;
  const float* mean;  // if CENTERED
  const float* rstd;
  const uint64_t* seed;
  uint8_t* q;
  float* scale;
  uint8_t* qt;
  float* scale_t;
  float* parts;  // [clusters, n] of dweight, then, if CENTERED, of dbias
  int64_t x_pitch, x_scale_pitch, dy_pitch, dy_scale_pitch;  // elements from row to row
  int32_t m, n;
};

// A tile of x and dy. Of each row, units of 16 codes lie where `unit_at` says.
struct Tile {
  uint8_t x[SIDE * COLUMNS], dy[SIDE * COLUMNS];
  float mean[SIDE], rstd[SIDE];
  struct Scales {
    float x, dy;
  } scales[COLUMNS / SIDE];
};

struct Sums {
  float plain, along;  // Σg and Σg·x̂ of a row, g = dy·weight
};

struct Shared {
  Tile tiles[STAGES];
  float weight[COLUMNS];
  Sums of_warps[WARPS][SIDE + 1];    // apart, so that a row's are in several banks
  Sums of_blocks[2][CLUSTER][SIDE];  // by turn, even or odd
  uint64_t sent[2];                  // barriers: all blocks' have come
};
static_assert(sizeof(Shared) == SHARED_BYTES, "as the host counts them");

extern __shared__ __align__(128) uint8_t memory[];

// --- places --------------------------------------------------------------------------------------

// Where a row's unit of 16 codes lies: lanes of a half warp have eight codes each of four rows that
// are four apart, and so read all banks once.
DEVICE int unit_at(int row, int unit) { return row * COLUMNS + 16 * (unit ^ row / TALL % 4 * 2); }

struct Lane {
  int warp, index, row, column;  // its first row of a tile, and first column of a warp's block
  DEVICE Lane()
      : warp(threadIdx.x / 32), index(threadIdx.x % 32), row(index / 4 * TALL),
        column(index % 4 * WIDE) {}
  // Within the block's columns, of the warp's b-th block.
  DEVICE int first(int b) const { return (warp * ACROSS + b) * SIDE + column; }
  DEVICE uint2 codes(const uint8_t* tile, int b, int k) const {
    const int at = unit_at(row, first(b) / 16) + first(b) % 16 + k * COLUMNS;
    return *reinterpret_cast<const uint2*>(tile + at);
  }
};

// --- loading -------------------------------------------------------------------------------------

DEVICE void copy_float(float& to, const float* from, int64_t at, bool inside) {
  copy_async<4>(shared_address(&to), from + at, inside ? 4 : 0);
}

// Codes at rows and columns of a tile, zeros beyond the matrix.
DEVICE void fetch_codes(uint8_t* to, const uint8_t* from, int64_t pitch, int row0, int column0,
                        const Arguments& p) {
  if constexpr (ACCESS == 16) {
    constexpr int UNITS = COLUMNS / 16, STEP = THREADS / UNITS;
    const int unit = threadIdx.x % UNITS, column = column0 + 16 * unit;
    const int first = threadIdx.x / UNITS % STEP;  // which tells the compiler that it is below
    const uint8_t* source = from + (row0 + first) * pitch + column;
#pragma unroll
    for (int i = 0; i < SIDE / STEP; ++i, source += STEP * pitch) {
      const int row = first + i * STEP;
      const bool inside = row0 + row < p.m && column < p.n;
      copy_async<16>(shared_address(to + unit_at(row, unit)), source, inside ? 16 : 0);
    }
  } else {
#pragma unroll 1  // it would spill
    for (int i = threadIdx.x; i < SIDE * COLUMNS; i += THREADS) {
      const int row = i / COLUMNS, within = i % COLUMNS, column = column0 + within;
      const bool inside = row0 + row < p.m && column < p.n;
      to[unit_at(row, within / 16) + within % 16] =
          inside ? from[(row0 + row) * pitch + column] : 0;
    }
  }
}

DEVICE void fetch(Tile& to, int row0, int column0, const Arguments& p) {
  fetch_codes(to.x, p.x, p.x_pitch, row0, column0, p);
  fetch_codes(to.dy, p.dy, p.dy_pitch, row0, column0, p);
  const int i = threadIdx.x;
  if (i < SIDE) {
    const bool inside = row0 + i < p.m;
    if (CENTERED) copy_float(to.mean[i], p.mean, row0 + i, inside);
    copy_float(to.rstd[i], p.rstd, row0 + i, inside);
  } else if (i < SIDE + COLUMNS / SIDE) {
    const int block = i - SIDE, column = column0 + block * SIDE;
    const int64_t row = row0 / BLOCK;
    auto& scales = to.scales[block];
    copy_float(scales.x, p.x_scale, row * p.x_scale_pitch + column / BLOCK, column < p.n);
    copy_float(scales.dy, p.dy_scale, row * p.dy_scale_pitch + column / BLOCK, column < p.n);
  }
}

// --- arithmetic ----------------------------------------------------------------------------------

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

DEVICE void load_floats(float (&to)[TALL], const float* from) {
  const float4 x = *reinterpret_cast<const float4*>(from);
  to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

DEVICE void load_floats(float (&to)[WIDE], const float* from) {
#pragma unroll
  for (int j = 0; j < WIDE; j += 4) {
    const float4 x = *reinterpret_cast<const float4*>(from + j);
    to[j] = x.x, to[j + 1] = x.y, to[j + 2] = x.z, to[j + 3] = x.w;
  }
}

// a/b, correctly rounded where both and every step between are normal numbers.
DEVICE float divide(float a, float b) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
  y = __fmaf_rn(y, __fmaf_rn(-b, y, 1.0f), y);
  const float quotient = __fmul_rn(a, y);
  return __fmaf_rn(__fmaf_rn(-b, quotient, a), y, quotient);
}

// `block_scale` without its branches, which all lanes of a warp would take for one block.
DEVICE void scale_of(float amax, float& scale, float& multiplier) {
  const bool zero = amax < 0x1p-100f;
  const bool usable = amax >= 0x1p-100f && amax < __int_as_float(0x7F800000);
  // Down by 2^64 where the reciprocal would be subnormal: exact both ways.
  const float shrink = amax > 0x1p64f ? 0x1p-64f : 1.0f;
  scale = divide(usable ? amax : 127.0f, 127.0f);
  scale = usable ? scale : zero ? 0.0f : __int_as_float(0x7FC00000);
  multiplier = usable ? __fmul_rn(divide(127.0f, __fmul_rn(amax, shrink)), shrink) : 0.0f;
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

// --- 1. sum --------------------------------------------------------------------------------------

struct ColumnSums {
  float dweight[ACROSS][WIDE] = {}, dbias[ACROSS][WIDE] = {};
};

// Add the tile's sums over rows to `of_columns`; return those over the warp's columns, of the row
// with the lane's index. Scales come last, so that no step is out of range where x̂ and dy are not.
DEVICE Sums sum(ColumnSums& of_columns, const Tile& tile, const float* weight, const Lane& lane) {
  float mean[TALL] = {}, rstd[TALL], plain[TALL] = {}, along[TALL] = {};
  if (CENTERED) load_floats(mean, tile.mean + lane.row);
  load_floats(rstd, tile.rstd + lane.row);
#pragma unroll
  for (int b = 0; b < ACROSS; ++b) {
    const int block = lane.warp * ACROSS + b;
    const auto [x_scale, dy_scale] = tile.scales[block];
    float w[WIDE], dweight[WIDE], dbias[WIDE];
    load_floats(w, weight + lane.first(b));
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
      float x[WIDE], dy[WIDE], g = 0, gx = 0;
      to_floats(x, lane.codes(tile.x, b, k));
      to_floats(dy, lane.codes(tile.dy, b, k));
      const float step = x_scale * rstd[k], shift = mean[k] * rstd[k];
#pragma unroll
      for (int j = 0; j < WIDE; ++j) {
        // dy·x̂, or without its scales.
        const float product = dy[j] * (CENTERED ? fmaf(x[j], step, -shift) : x[j]);
        const float of_column = CENTERED ? product : product * rstd[k];
        g = j ? fmaf(dy[j], w[j], g) : dy[j] * w[j];
        gx = j ? fmaf(product, w[j], gx) : product * w[j];
        dweight[j] = k ? dweight[j] + of_column : of_column;
        dbias[j] = k ? dbias[j] + dy[j] : dy[j];
      }
      if (!CENTERED) gx *= step;
      plain[k] = fmaf(g, dy_scale, plain[k]);
      along[k] = fmaf(gx, dy_scale, along[k]);
    }
#pragma unroll
    for (int j = 0; j < WIDE; ++j) {
      const float scaled = CENTERED ? dweight[j] : dweight[j] * x_scale;
      of_columns.dweight[b][j] = fmaf(scaled, dy_scale, of_columns.dweight[b][j]);
      if (CENTERED) of_columns.dbias[b][j] = fmaf(dbias[j], dy_scale, of_columns.dbias[b][j]);
    }
  }
  return {CENTERED ? share<1>(plain, lane.index) : 0.0f, share<1>(along, lane.index)};
}

// --- 2. exchange ---------------------------------------------------------------------------------

// Write to the place in a block of the cluster that `to` has in this one, and tell its barrier. A
// barrier of the cluster would wait for all that was written before, dx too.
DEVICE void send(Sums& to, uint64_t& barrier, uint32_t rank, Sums x) {
  asm volatile(
      "{\n.reg .b32 there, done;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 done, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 "
      "[there], {%3, %4}, [done];\n}"
      ::"r"(shared_address(&to)), "r"(shared_address(&barrier)), "r"(rank), "f"(x.plain),
        "f"(x.along) : "memory");
}

// The whole row's sums, of the row with the lane's index. All warps come here, of all blocks.
DEVICE Sums exchange(Shared& shared, Sums mine, uint32_t rank, int turn, const Lane& lane) {
  shared.of_warps[lane.warp][lane.index] = mine;
  __syncthreads();
  // Each warp adds up the warps' sums of some rows, a lane for each.
  const int other = lane.index % WARPS, row = (threadIdx.x - other) / WARPS;
  Sums sums = shared.of_warps[other][row];
#pragma unroll
  for (int step = 1; step < WARPS; step *= 2) {
    if (CENTERED) sums.plain += __shfl_xor_sync(ALL, sums.plain, step);
    sums.along += __shfl_xor_sync(ALL, sums.along, step);
  }
  // Two places serve all turns: a block sends after it has read those of the turn before, and has
  // them only once all blocks sent them, after they had read those of the turn before that.
  auto& of_blocks = shared.of_blocks[turn % 2];
  if constexpr (CLUSTER == 1) {
    if (other == 0) of_blocks[0][row] = sums;
    __syncthreads();
  } else {
    uint64_t& sent = shared.sent[turn % 2];
    if (threadIdx.x == 0) barrier_expect(shared_address(&sent), sizeof(of_blocks));
    for (int to = other; to < CLUSTER; to += WARPS) send(of_blocks[rank][row], sent, to, sums);
    barrier_wait(shared_address(&sent), turn / 2 % 2);
  }
  Sums all = of_blocks[0][lane.index];
#pragma unroll
  for (int from = 1; from < CLUSTER; ++from) {
    const Sums part = of_blocks[from][lane.index];
    all.plain += part.plain;
    all.along += part.along;
  }
  return all;
}

// --- 3. write ------------------------------------------------------------------------------------

// Four codes in a word, 0 where `sound` is: the low bytes of four floats.
DEVICE uint32_t pack(const float* codes, uint32_t sound) {
  const uint32_t low = __byte_perm(__float_as_uint(codes[0]), __float_as_uint(codes[1]), 0x0040);
  const uint32_t high = __byte_perm(__float_as_uint(codes[2]), __float_as_uint(codes[3]), 0x0040);
  return __byte_perm(low, high, 0x5410) & sound;
}

// Random words of eight neighbours of each row, as `philox` makes them: the rounds of the lane's
// rows side by side, so that the key's schedule is counted once.
DEVICE void draw(Words (&words)[TALL], uint64_t seed, int row, int column) {
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
#pragma unroll
  for (int k = 0; k < TALL; ++k) words[k] = {{uint32_t(column / WIDE), uint32_t(row + k), 0, 0}};
#pragma unroll
  for (int round = 0; round < 7; ++round) {
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
      uint32_t(&c)[4] = words[k].w;
      const uint64_t p0 = uint64_t(c[0]) * 0xD2511F53u, p1 = uint64_t(c[2]) * 0xCD9E8D57u;
      c[0] = uint32_t(p1 >> 32) ^ c[1] ^ k0;
      c[2] = uint32_t(p0 >> 32) ^ c[3] ^ k1;
      c[1] = uint32_t(p1);
      c[3] = uint32_t(p0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// Codes of eight neighbours of a row; product and sum round together.
DEVICE uint2 codes_of(const float (&x)[WIDE], float multiplier, uint32_t sound,
                      const Words& words) {
  float code[WIDE];
#pragma unroll
  for (int j = 0; j < WIDE; ++j) {
    if constexpr (STOCHASTIC) {
      // 128 + u + p lies in [1, 256): rounding it down onto 1.5·2^23 − 128 leaves floor(p + u).
      const uint32_t u = __byte_perm(words.w[j / 2], 0x4300, j % 2 ? 0x5432 : 0x5410);
      code[j] = __fadd_rd(__fmaf_rn(x[j], multiplier, __uint_as_float(u)), INTEGER - 128.0f);
    } else {
      code[j] = __fmaf_rn(x[j], multiplier, INTEGER);
    }
  }
  return {pack(code, sound), pack(code + 4, sound)};
}

DEVICE void store_q(uint8_t* to, uint2 codes, int column, const Arguments& p) {
  if constexpr (Q_ACCESS == WIDE) {
    if (column < p.n) *reinterpret_cast<uint2*>(to) = codes;
  } else {
#pragma unroll
    for (int j = 0; j < WIDE; ++j) {
      if (column + j < p.n) to[j] = uint8_t((j < 4 ? codes.x : codes.y) >> j % 4 * 8);
    }
  }
}

DEVICE void store_qt_word(uint8_t* qt, uint32_t codes, int row, int column, const Arguments& p) {
  if (column >= p.n) return;
  uint8_t* to = qt + int64_t(column) * p.m + row;
  if constexpr (QT_ACCESS == TALL) {
    if (row < p.m) *reinterpret_cast<uint32_t*>(to) = codes;
  } else {
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
      if (row + k < p.m) to[k] = uint8_t(codes >> k * 8);
    }
  }
}

// Four rows' words of four columns, as four columns' words of four rows.
DEVICE void store_qt(uint8_t* qt, uint32_t a, uint32_t b, uint32_t c, uint32_t d, int row,
                     int column, const Arguments& p) {
  const uint32_t ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
  const uint32_t ab2 = __byte_perm(a, b, 0x7362), cd2 = __byte_perm(c, d, 0x7362);
  store_qt_word(qt, __byte_perm(ab, cd, 0x5410), row, column, p);
  store_qt_word(qt, __byte_perm(ab, cd, 0x7632), row, column + 1, p);
  store_qt_word(qt, __byte_perm(ab2, cd2, 0x5410), row, column + 2, p);
  store_qt_word(qt, __byte_perm(ab2, cd2, 0x7632), row, column + 3, p);
}

// Replace ∞ by fp32's largest number, so that a code of 0 times it is 0.
DEVICE float finite(float x) { return x > 0x1.fffffep127f ? 0x1.fffffep127f : x; }

// dx = dy·weight·rstd + x·rstd·slope + offset of the warp's b-th block: the lane's values.
DEVICE void gradient(float (&dx)[TALL][WIDE], const Tile& tile, const float* weight, int b,
                     const float (&slope)[TALL], const float (&offset)[TALL], int columns,
                     const Lane& lane) {
  const int block = lane.warp * ACROSS + b;
  const auto [x_scale, dy_scale] = tile.scales[block];
  float w[WIDE], rstd[TALL];
  load_floats(w, weight + lane.first(b));
  load_floats(rstd, tile.rstd + lane.row);
#pragma unroll
  for (int k = 0; k < TALL; ++k) {
    float x[WIDE], dy[WIDE];
    to_floats(x, lane.codes(tile.x, b, k));
    to_floats(dy, lane.codes(tile.dy, b, k));
    const float of_dy = finite(dy_scale * rstd[k]), of_x = x_scale * rstd[k] * slope[k];
#pragma unroll
    for (int j = 0; j < WIDE; ++j) {
      const float rest = CENTERED ? fmaf(x[j], of_x, offset[k]) : x[j] * of_x;
      dx[k][j] = fmaf(dy[j] * of_dy, w[j], rest);
      // What lies beyond the matrix would hold the offset.
      if (CENTERED && !WHOLE_COLUMNS && j >= columns) dx[k][j] = 0.0f;
    }
  }
}

DEVICE void write(const Tile& tile, const float* weight, const float (&slope)[TALL],
                  const float (&offset)[TALL], uint64_t seed, int row0, int column0,
                  const Arguments& p, const Lane& lane) {
  const int row = row0 + lane.row;
#pragma unroll 1  // two blocks at once would spill
  for (int b = 0; b < ACROSS; ++b) {
    const int column = column0 + lane.first(b);
    float dx[TALL][WIDE], most = 0;
    gradient(dx, tile, weight, b, slope, offset, p.n - column, lane);
#pragma unroll
    for (int i = 0; i < TALL * WIDE; ++i) most = max_nan(most, fabsf(dx[i / WIDE][i % WIDE]));
    // The bits of floats above 0 order as they do, and NaN above all.
    const uint32_t amax = __reduce_max_sync(ALL, __float_as_uint(most));
    float scale, multiplier;
    scale_of(__uint_as_float(amax), scale, multiplier);
    const uint32_t sound = multiplier != 0 ? ALL : 0;
    if (STOCHASTIC) multiplier *= 0.9999998f;  // a product of just -127 might floor to -128
    Words words[TALL];
    uint2 codes[TALL];
    if (STOCHASTIC) draw(words, seed, row, column);
    uint8_t* q = p.q + int64_t(row) * p.n + column;
#pragma unroll
    for (int k = 0; k < TALL; ++k, q += p.n) {
      codes[k] = codes_of(dx[k], multiplier, sound, words[k]);
      if (WRITES_Q && row + k < p.m) store_q(q, codes[k], column, p);
    }
    if (WRITES_QT) {
      store_qt(p.qt, codes[0].x, codes[1].x, codes[2].x, codes[3].x, row, column, p);
      store_qt(p.qt, codes[0].y, codes[1].y, codes[2].y, codes[3].y, row, column + 4, p);
    }
    if (lane.index == 0 && column < p.n) {
      const int64_t i = row0 / SIDE, j = column / SIDE;
      if (WRITES_Q) p.scale[i * ceil_div(p.n, SIDE) + j] = scale;
      if (WRITES_QT) p.scale_t[j * ceil_div(p.m, SIDE) + i] = scale;
    }
  }
}

// --- all -----------------------------------------------------------------------------------------

DEVICE void store_column_sums(ColumnSums& sums, int cluster, int clusters, int column0,
                              const Arguments& p, const Lane& lane) {
  const int64_t all = int64_t(clusters) * p.n;
#pragma unroll
  for (int b = 0; b < ACROSS; ++b) {
    const float dweight = share<4>(sums.dweight[b], lane.index / 4);
    const float dbias = CENTERED ? share<4>(sums.dbias[b], lane.index / 4) : 0.0f;
    const int column = column0 + lane.first(b) + lane.index / 4;
    float* to = p.parts + int64_t(cluster) * p.n + column;
    if (column < p.n) to[0] = dweight;
    if (CENTERED && column < p.n) to[all] = dbias;
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
    cluster(const Arguments p) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Lane lane;
  const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
  const int column0 = rank * COLUMNS, tiles = ceil_div(p.m, SIDE);
  const uint64_t seed = STOCHASTIC ? *p.seed : 0;
  const float inverse = 1.0f / float(p.n);

  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
    shared.weight[i] = column0 + i < p.n ? p.weight[column0 + i] : 0.0f;
  }
  if (threadIdx.x < 2) {
    barrier_init(shared_address(&shared.sent[threadIdx.x]), 1);
    fence_barrier_init();
  }
#pragma unroll
  for (int ahead = 0; ahead < STAGES - 1; ++ahead) {
    const int tile = cluster + ahead * clusters;
    if (tile < tiles) fetch(shared.tiles[ahead], tile * SIDE, column0, p);
    copy_commit();
  }
  if (CLUSTER > 1) cluster_sync();  // nobody sends to a block that has not begun

  ColumnSums of_columns;
  int turn = 0, stage = 0;
#pragma unroll 1
  for (int index = cluster; index < tiles; index += clusters, ++turn) {
    copy_wait<STAGES - 2>();
    __syncthreads();  // the tile is there for all, and all are done with the one before it
    const int next = index + (STAGES - 1) * clusters;
    const int free = stage ? stage - 1 : STAGES - 1;
    if (next < tiles) fetch(shared.tiles[free], next * SIDE, column0, p);
    copy_commit();

    const Tile& tile = shared.tiles[stage];
    const Sums mine = sum(of_columns, tile, shared.weight, lane);
    const Sums row = exchange(shared, mine, rank, turn, lane);
    const float rstd = tile.rstd[lane.index];
    const float row_slope = -rstd * (row.along * inverse);
    const float shift = CENTERED ? tile.mean[lane.index] * rstd : 0.0f;
    const float row_offset = -shift * row_slope - rstd * (row.plain * inverse);
    float slope[TALL], offset[TALL];
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
      slope[k] = __shfl_sync(ALL, row_slope, lane.row + k);
      offset[k] = CENTERED ? __shfl_sync(ALL, row_offset, lane.row + k) : 0.0f;
    }
    write(tile, shared.weight, slope, offset, seed, index * SIDE, column0, p, lane);
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }
  store_column_sums(of_columns, cluster, clusters, column0, p, lane);
}
