// GELU, or its gradient if BACKWARD, from blocks of INT8 codes to others, in tiles of 128×128.
//
// Blocks of the grid go over tiles, one turn each, while the next tiles are on their way to shared
// memory. A tile is 16 parts of 32×32 codes, of which a warp has PARTS, side by side. A part has
// one scale of x, so that a table over its 256 codes takes the place of the formula at each
// element. A warp makes its own.
//
// BY_CODE (forward, to nearest): what is written depends on the code alone, so the table has that,
// a byte per code. The block's largest value must then be known first. It is that of its largest
// code, unless that is less than the most that |gelu| is below 0.
//
// Otherwise the table has floats. A lane looks its values up and keeps them until the largest of
// the block that is written is known, to all warps that have a part of it.
#include "codes.cuh"
#include "config.cuh"
#include "curve.cuh"

constexpr int TILE = 128, ACROSS = TILE / SIDE, PARTS_OF_TILE = ACROSS * ACROSS;
constexpr int THREADS = 32 * WARPS, PARTS = PARTS_OF_TILE / WARPS;
constexpr int HELD = OUT_BLOCK == SIDE ? 1 : PARTS;  // parts that a warp has in registers at once
constexpr int OPERANDS = BACKWARD ? 2 : 1;
constexpr bool BY_CODE = !BACKWARD && !STOCHASTIC;
constexpr int ENTRY = BY_CODE ? 1 : 4;  // bytes
// Of values. In it all are finite: whether one overflows fp32, its block's scale says.
constexpr float UNIT = 0x1p14f;
constexpr float LARGEST = 0x1.fffffep127f;

struct Matrix {
  const uint8_t* codes;
  const float* scales;
  int64_t pitch, scale_pitch;  // elements from row to row
};

struct Arguments {
  Matrix inputs[2];  // x, and if BACKWARD dy
  const uint64_t* seed;
  uint8_t* q;
  float* scale;
  uint8_t* qt;
  float* scale_t;
  int32_t m, n;
};

// Of each row of codes, units of 16 lie where `unit_at` says.
struct Tile {
  uint8_t codes[OPERANDS][TILE * TILE];
  float scales[OPERANDS][PARTS_OF_TILE];
};

struct Shared {
  uint8_t tables[WARPS][256 * ENTRY];  // by code, as unsigned
  Tile tiles[STAGES];
  uint32_t most[2][PARTS_OF_TILE];  // the bits of parts' largest values
};
static_assert(sizeof(Shared) == SHARED_BYTES, "as the host counts them");

extern __shared__ __align__(128) uint8_t memory[];

// --- places --------------------------------------------------------------------------------------

// Where a row's unit of 16 codes lies: lanes of a half warp have eight codes each of four rows that
// are four apart, and so read all banks once.
DEVICE int unit_at(int row, int unit) { return row * TILE + 16 * (unit ^ row / TALL % 4 * 2); }

DEVICE int row_of(int part) { return part / ACROSS * SIDE; }
DEVICE int column_of(int part) { return part % ACROSS * SIDE; }

struct Lane {
  int warp, index, row, column;  // its first row and column of a part
  DEVICE Lane()
      : warp(threadIdx.x / 32), index(threadIdx.x % 32), row(index / 4 * TALL),
        column(index % 4 * WIDE) {}
  // Of the part's k-th row of the lane.
  DEVICE uint2 codes(const uint8_t* tile, int part, int k) const {
    const int first = column_of(part) + column;
    const int at = unit_at(row, first / 16) + first % 16 + (row_of(part) + k) * TILE;
    return *reinterpret_cast<const uint2*>(tile + at);
  }
};

// A tile of those that a block of the grid goes over, numbered along rows.
struct Place {
  int row, column;  // in tiles
  DEVICE Place(int index, int across) : row(index / across), column(index % across) {}
  DEVICE void advance(const Place& step, int across) {
    row += step.row;
    column += step.column;
    if (column >= across) column -= across, ++row;
  }
};

// --- loading -------------------------------------------------------------------------------------

// Codes of a tile, zeros beyond the matrix.
DEVICE void fetch_codes(uint8_t* to, const Matrix& from, int row0, int column0, int m, int n) {
  if constexpr (ACCESS == 16) {
    constexpr int UNITS = TILE / 16, STEP = THREADS / UNITS;
    const int unit = threadIdx.x % UNITS, first = threadIdx.x / UNITS, column = column0 + 16 * unit;
    const uint8_t* source = from.codes + (row0 + first) * from.pitch + column;
    const int left = column < n ? m - row0 : 0;
#pragma unroll
    for (int i = 0; i < TILE / STEP; ++i, source += STEP * from.pitch) {
      const int row = first + i * STEP;
      copy_async<16>(shared_address(to + unit_at(row, unit)), source, row < left ? 16 : 0);
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < TILE * TILE; i += THREADS) {
      const int row = i / TILE, within = i % TILE;
      const bool inside = row0 + row < m && column0 + within < n;
      const uint8_t* source = from.codes + (row0 + row) * from.pitch + column0 + within;
      to[unit_at(row, within / 16) + within % 16] = inside ? *source : 0;
    }
  }
}

DEVICE void fetch(Tile& to, const Place& place, const Arguments& p) {
  const int row0 = place.row * TILE, column0 = place.column * TILE;
  const int part = threadIdx.x % PARTS_OF_TILE;
  const int row = row0 + row_of(part), column = column0 + column_of(part);
#pragma unroll
  for (int i = 0; i < OPERANDS; ++i) {
    const Matrix& from = p.inputs[i];
    fetch_codes(to.codes[i], from, row0, column0, p.m, p.n);
    if (threadIdx.x / PARTS_OF_TILE == i) {
      const float* source = from.scales + row / BLOCK * from.scale_pitch + column / BLOCK;
      const bool inside = row < p.m && column < p.n;
      copy_async<4>(shared_address(&to.scales[i][part]), source, inside ? 4 : 0);
    }
  }
}

// --- a part --------------------------------------------------------------------------------------

DEVICE float finite_or_zero(float scale) { return fabsf(scale) <= LARGEST ? scale : 0.0f; }

// The entry of a word's j-th code in the warp's table: `base` is 256 times the warp.
DEVICE uint32_t entry_of(uint32_t word, int j, uint32_t base) {
  return __byte_perm(word, base, 0x7650 | j);
}

// A lane's codes, and the table of those to write for them.
struct ByCode {
  uint2 codes[TALL];

  // Return the value of the part's largest code if that is above 0.
  DEVICE float read(uint8_t*, const Tile& tile, int part, const Curve& curve, bool,
                    const Lane& lane) {
    uint32_t odd = 0, even = 0;  // the largest of codes, of two each as high bytes of half words
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
      codes[k] = lane.codes(tile.codes[0], part, k);
      odd = larger(larger(odd, codes[k].x), codes[k].y);
      even = larger(larger(even, codes[k].x << 8), codes[k].y << 8);
    }
    const int both = larger(odd, even);
    const int most = __reduce_max_sync(ALL, max(both >> 24, both << 16 >> 24));
    return curve(float(most)).plus;
  }

  // The largest |value|, from the formula at each code. Codes are read anew: registers have no
  // index.
  static DEVICE float most(const Tile& tile, int part, const Curve& curve, const Lane& lane) {
    float most = 0;
#pragma unroll 1
    for (int k = 0; k < TALL; ++k) {
      const uint2 words = lane.codes(tile.codes[0], part, k);
#pragma unroll
      for (int j = 0; j < WIDE; ++j) {
        const int code = int((j < 4 ? words.x : words.y) << (3 - j % 4) * 8) >> 24;
        const Pair pair = curve(float(abs(code)));
        most = fmaxf(most, code < 0 ? -pair.minus : pair.plus);
      }
    }
    return __uint_as_float(__reduce_max_sync(ALL, __float_as_uint(most)));
  }

  // A lane has codes 4·index + 1 … + 4 and their negatives: of the words of the table that are
  // above 0, the first byte is the lane's before it.
  static DEVICE void tabulate(uint8_t* table, const Curve& curve, float multiplier,
                              const Lane& lane) {
    uint32_t plus[4], minus[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Pair pair = curve(float(4 * lane.index + 1 + j));
      plus[j] = rounded(pair.plus, multiplier);
      minus[j] = rounded(pair.minus, multiplier);
    }
    uint32_t before = __shfl_up_sync(ALL, plus[3], 1);
    if (lane.index == 0) before = 0;
    uint32_t* words = reinterpret_cast<uint32_t*>(table);
    words[lane.index] = pack(before, plus[0], plus[1], plus[2]);
    words[63 - lane.index] = pack(minus[3], minus[2], minus[1], minus[0]);
  }

  DEVICE void write(uint2 (&to)[TALL], uint8_t* table, const Curve& curve, float multiplier,
                    bool anew, uint64_t, int, int, const Lane& lane) const {
    if (anew) {
      __syncwarp();
      tabulate(table, curve, multiplier, lane);
      __syncwarp();
    }
#pragma unroll
    for (int k = 0; k < TALL; ++k) to[k] = {look_up(codes[k].x, lane), look_up(codes[k].y, lane)};
  }

 private:
  static DEVICE uint32_t larger(uint32_t a, uint32_t b) {
    asm("max.s16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
  }

  static DEVICE uint32_t look_up(uint32_t word, const Lane& lane) {
    const uint32_t base = lane.warp << 8;
    return pack(memory[entry_of(word, 0, base)], memory[entry_of(word, 1, base)],
                memory[entry_of(word, 2, base)], memory[entry_of(word, 3, base)]);
  }
};

// A lane's values, without their block's last scale.
struct ByValue {
  float values[TALL][WIDE];

  static DEVICE void tabulate(float* table, const Curve& curve, const Lane& lane) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int a = lane.index + 1 + 32 * j;
      Pair pair = curve(float(a));
      if (a == 128) pair.plus = AT_ZERO;  // no code is 128
      table[a % 128] = pair.plus;
      table[256 - a] = pair.minus;
    }
  }

  DEVICE float read(uint8_t* table, const Tile& tile, int part, const Curve& curve, bool anew,
                    const Lane& lane) {
    if (anew) {
      __syncwarp();
      tabulate(reinterpret_cast<float*>(table), curve, lane);
      __syncwarp();
    }
    const float* tables = reinterpret_cast<const float*>(memory);
    float most = 0;
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
      const uint2 x = lane.codes(tile.codes[0], part, k);
      float dy[WIDE];
      if constexpr (BACKWARD) to_floats(dy, lane.codes(tile.codes[1], part, k));
#pragma unroll
      for (int j = 0; j < WIDE; ++j) {
        const float entry = tables[entry_of(j < 4 ? x.x : x.y, j % 4, lane.warp << 8)];
        values[k][j] = BACKWARD ? dy[j] * entry : entry;
        most = fmaxf(most, fabsf(values[k][j]));
      }
    }
    return __uint_as_float(__reduce_max_sync(ALL, __float_as_uint(most)));
  }

  DEVICE void write(uint2 (&to)[TALL], uint8_t*, const Curve&, float multiplier, bool,
                    uint64_t seed, int row, int column, const Lane&) const {
    Words words[TALL];
    if constexpr (STOCHASTIC) draw(words, seed, row, column);
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
      uint32_t codes[WIDE];
#pragma unroll
      for (int j = 0; j < WIDE; ++j) {
        if constexpr (STOCHASTIC) codes[j] = rounded(values[k][j], multiplier, words[k], j);
        else codes[j] = rounded(values[k][j], multiplier);
      }
      to[k] = {pack(codes[0], codes[1], codes[2], codes[3]),
               pack(codes[4], codes[5], codes[6], codes[7])};
    }
  }
};

// --- a tile --------------------------------------------------------------------------------------

DEVICE void store(const uint2 (&codes)[TALL], float scale, int part, int row0, int column0,
                  const Arguments& p, const Lane& lane) {
  const int row = row0 + lane.row, column = column0 + lane.column;
  if constexpr (WRITES_Q) {
    uint8_t* q = p.q + int64_t(row) * p.n + column;
#pragma unroll
    for (int k = 0; k < TALL; ++k, q += p.n) {
      if (row + k < p.m) store_row<Q_ACCESS>(q, codes[k], column, p.n);
    }
  }
  if constexpr (WRITES_QT) {
    const uint32_t left[TALL] = {codes[0].x, codes[1].x, codes[2].x, codes[3].x};
    const uint32_t right[TALL] = {codes[0].y, codes[1].y, codes[2].y, codes[3].y};
    store_columns<QT_ACCESS>(p.qt, left, row, column, p.m, p.n);
    store_columns<QT_ACCESS>(p.qt, right, row, column + 4, p.m, p.n);
  }
  const bool first = row_of(part) % OUT_BLOCK == 0 && column_of(part) % OUT_BLOCK == 0;
  if (first && lane.index == 0 && row0 < p.m && column0 < p.n) {
    const int64_t i = row0 / OUT_BLOCK, j = column0 / OUT_BLOCK;
    if (WRITES_Q) p.scale[i * ceil_div(p.n, OUT_BLOCK) + j] = scale;
    if (WRITES_QT) p.scale_t[j * ceil_div(p.m, OUT_BLOCK) + i] = scale;
  }
}

// The largest of the parts of the block that the warp's are of. All warps of the block come here.
DEVICE float largest(uint32_t (&slots)[PARTS_OF_TILE], const float (&most)[HELD], int part,
                     const Lane& lane) {
  if constexpr (OUT_BLOCK == SIDE) return most[0];
  constexpr int N = OUT_BLOCK / SIDE, BLOCKS = PARTS_OF_TILE / (N * N);
  const int down = part / ACROSS / N, across = part % ACROSS / N;
#pragma unroll
  for (int b = 0; b < HELD; ++b) {
    if (lane.index == 0) slots[part + b] = __float_as_uint(most[b]);
  }
  named_barrier(1 + down * (ACROSS / N) + across, THREADS / BLOCKS);
  const int first = (down * ACROSS + across) * N, i = lane.index % (N * N);
  // The bits of floats above 0 order as they do, and NaN above all.
  return __uint_as_float(__reduce_max_sync(ALL, slots[first + i / N * ACROSS + i % N]));
}

template <class Part>
DEVICE void turn(Shared& shared, const Tile& tile, const Place& place, uint64_t seed,
                 const Arguments& p, const Lane& lane) {
  uint8_t* table = shared.tables[lane.warp];
#pragma unroll 1
  for (int begin = 0; begin < PARTS; begin += HELD) {
    const int part = lane.warp * PARTS + begin;
    Part held[HELD];
    float factor[HELD], bad[HELD], most[HELD];
#pragma unroll
    for (int b = 0; b < HELD; ++b) {
      const float x_scale = tile.scales[0][part + b];
      const float last = tile.scales[OPERANDS - 1][part + b];
      const Curve curve(finite_or_zero(x_scale));
      // Parts that lie side by side are of one block if that is larger.
      const bool anew = b == 0 || BLOCK == SIDE;
      factor[b] = finite_or_zero(last) * (1 / UNIT);
      bad[b] = x_scale * 0.0f + last * 0.0f;  // NaN where a scale is not finite
      most[b] = held[b].read(table, tile, part + b, curve, anew, lane) * factor[b] + bad[b];
    }
    float all = largest(shared.most[0], most, part, lane);
    if constexpr (BY_CODE) {
      if (all * UNIT < DIP) {  // for all warps that share a block
#pragma unroll
        for (int b = 0; b < HELD; ++b) {
          const Curve curve(finite_or_zero(tile.scales[0][part + b]));
          most[b] = Part::most(tile, part + b, curve, lane) * factor[b];
        }
        all = largest(shared.most[1], most, part, lane);
      }
    }
    float scale, multiplier;
    block_scale(__float_as_uint(all * UNIT), scale, multiplier);
    // Products of factors and of the largest value round thrice: stochastic rounding wants less
    // than 127.
    multiplier *= STOCHASTIC ? UNIT * 0.9999995f : UNIT;
#pragma unroll
    for (int b = 0; b < HELD; ++b) {
      const int row = place.row * TILE + row_of(part + b);
      const int column = place.column * TILE + column_of(part + b);
      // Where it is infinite all codes are 0.
      const float of_part = fminf(factor[b] * multiplier, LARGEST);
      const Curve curve(finite_or_zero(tile.scales[0][part + b]));
      uint2 codes[TALL];
      held[b].write(codes, table, curve, of_part, b == 0 || BLOCK == SIDE, seed, row + lane.row,
                    column + lane.column, lane);
      store(codes, scale, part + b, row, column, p, lane);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) tiles(const Arguments p) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Lane lane;
  const uint64_t seed = STOCHASTIC ? *p.seed : 0;
  const int down = ceil_div(p.m, TILE), across = ceil_div(p.n, TILE);
  const Place step(gridDim.x, across);
  Place place(blockIdx.x, across), ahead = place;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i, ahead.advance(step, across)) {
    if (ahead.row < down) fetch(shared.tiles[i], ahead, p);
    copy_commit();
  }
  int stage = 0;
#pragma unroll 1
  for (; place.row < down; place.advance(step, across), ahead.advance(step, across)) {
    copy_wait<STAGES - 2>();
    __syncthreads();  // the tile is there for all, and all are done with the one before it
    if (ahead.row < down) fetch(shared.tiles[stage ? stage - 1 : STAGES - 1], ahead, p);
    copy_commit();
    if constexpr (BY_CODE) turn<ByCode>(shared, shared.tiles[stage], place, seed, p, lane);
    else turn<ByValue>(shared, shared.tiles[stage], place, seed, p, lane);
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }
}
