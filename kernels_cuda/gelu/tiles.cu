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
constexpr int TABLE_BYTES = BY_CODE ? 256 : 4 * (256 + 4);
// Of values. In it all are finite: whether one overflows fp32, its block's scale says.
constexpr float UNIT = 0x1p14f;
constexpr float LARGEST = 0x1.fffffep127f;

struct Matrix {
  const uint8_t* codes;
  const float* scales;
  int64_t pitch, scale_pitch;  // elements from row to row
};

struct Arguments {
  TensorMap maps[2];  // of the inputs' codes, in boxes of a tile; if TMA
  Matrix inputs[2];   // x, and if BACKWARD dy
  const uint64_t* seed;
  uint8_t* q;
  float* scale;
  uint8_t* qt;
  float* scale_t;
  int32_t m, n;
};

struct Shared {
  uint8_t codes[STAGES][OPERANDS][TILE * TILE];  // units of 16 lie where `unit_at` says
  uint8_t tables[WARPS][TABLE_BYTES];
  float scales[STAGES][OPERANDS][PARTS_OF_TILE];
  uint32_t most[2][PARTS_OF_TILE];  // the bits of parts' largest values
  uint64_t arrived[STAGES];         // barriers: a tile's codes have come; if TMA
};
static_assert(sizeof(Shared) == SHARED_BYTES, "as the host counts them");

// One of the tiles in shared memory.
struct Tile {
  const uint8_t* codes;
  const float* scales;
  DEVICE Tile(const Shared& shared, int stage)
      : codes(shared.codes[stage][0]), scales(shared.scales[stage][0]) {}
  DEVICE float scale(int operand, int part) const { return scales[operand * PARTS_OF_TILE + part]; }
};

extern __shared__ __align__(1024) uint8_t memory[];  // TMA's swizzle wants it

// --- places --------------------------------------------------------------------------------------

// Where a row's unit of 16 codes lies: as TMA's 128-byte swizzle has it.
DEVICE int unit_at(int row, int unit) { return row * TILE + 16 * (unit ^ row % 8); }

DEVICE int row_of(int part) { return part / ACROSS * SIDE; }
DEVICE int column_of(int part) { return part % ACROSS * SIDE; }

// A lane's four rows of a part go in the order 0, 1, 2, 3 or 2, 3, 0, 1. So the lanes of a half
// warp, which have eight codes each of four rows that are four apart, read all banks once.
struct Lane {
  int warp, index, row, column;  // its first row and column of a part
  int at;                        // where its first codes lie in a tile, of part 0
  int middle;                    // of the warp's table of floats: its address in shared memory
  bool exchanged;                // rows come in the second order
  DEVICE explicit Lane(const Shared& shared)
      : warp(__shfl_sync(ALL, threadIdx.x / 32, 0)), index(threadIdx.x % 32),
        row(index / 4 * TALL), column(index % 4 * WIDE), exchanged(index / 8 % 2) {
    row += exchanged ? 2 : 0;
    // Not of `warp`: what all lanes have in common would be copied for each use.
    middle = shared_address(shared.tables[threadIdx.x / 32]) + TABLE_BYTES / 2;
    at = unit_at(row, column / 16) + column % 16;
    asm volatile("" : "+r"(at));  // or it would be made anew for each use
  }
  DEVICE int row_at(int k) const { return row ^ k; }
  DEVICE uint2 codes(const Tile& tile, int operand, int part, int k) const {
    // As `unit_at` of row_at(k) and the part's columns: no two of these have a bit in common.
    const int to = at ^ column_of(part) ^ k * (TILE + 16);
    const uint8_t* from = tile.codes + operand * TILE * TILE + row_of(part) * TILE;
    return *reinterpret_cast<const uint2*>(from + to);
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

// Codes of a tile at any address, zeros beyond the matrix.
DEVICE void copy_codes(uint8_t* to, const Matrix& from, int row0, int column0, int m, int n) {
#pragma unroll 1
  for (int i = threadIdx.x; i < TILE * TILE; i += THREADS) {
    const int row = i / TILE, within = i % TILE;
    const bool inside = row0 + row < m && column0 + within < n;
    const uint8_t* source = from.codes + (row0 + row) * from.pitch + column0 + within;
    to[unit_at(row, within / 16) + within % 16] = inside ? *source : 0;
  }
}

DEVICE void fetch_scales(float* to, const Matrix& from, int row0, int column0, const Arguments& p) {
  const int part = threadIdx.x % PARTS_OF_TILE;
  const int row = row0 + row_of(part), column = column0 + column_of(part);
  const float* source = from.scales + row / BLOCK * from.scale_pitch + column / BLOCK;
  copy_async<4>(shared_address(to + part), source, row < p.m && column < p.n ? 4 : 0);
}

DEVICE void fetch(Shared& shared, int stage, const Place& place, const Arguments& p) {
  const int row0 = place.row * TILE, column0 = place.column * TILE;
  auto& codes = shared.codes[stage];
  if constexpr (!TMA) {
#pragma unroll
    for (int i = 0; i < OPERANDS; ++i) {
      copy_codes(codes[i], p.inputs[i], row0, column0, p.m, p.n);
    }
  }
  if (threadIdx.x >= 32) return;
  if (TMA && threadIdx.x == 0) {
    const uint32_t arrived = shared_address(&shared.arrived[stage]);
    barrier_expect(arrived, sizeof(codes));
#pragma unroll
    for (int i = 0; i < OPERANDS; ++i) {
      tma_load(shared_address(codes[i]), p.maps[i], column0, row0, arrived);
    }
  }
#pragma unroll
  for (int i = 0; i < OPERANDS; ++i) {
    if (threadIdx.x / PARTS_OF_TILE == i) {
      fetch_scales(shared.scales[stage][i], p.inputs[i], row0, column0, p);
    }
  }
}

// --- a part --------------------------------------------------------------------------------------

DEVICE float finite_or_zero(float scale) { return fabsf(scale) <= LARGEST ? scale : 0.0f; }

// A lane's codes, and the table of those to write for them.
struct ByCode {
  uint2 codes[TALL];

  // Return the value of the part's largest code if that is above 0.
  DEVICE float read(uint8_t*, const Tile& tile, int part, const Curve& curve, bool,
                    const Lane& lane) {
    uint32_t odd = 0, even = 0;  // the largest of codes, of two each as high bytes of half words
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
      codes[k] = lane.codes(tile, 0, part, k);
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
      const uint2 words = lane.codes(tile, 0, part, k);
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

  // What the table, at a multiple of 256 in shared memory, has for the codes of a word.
  static DEVICE uint32_t look_up(uint32_t word, const Lane& lane) {
    static_assert(sizeof(Shared::codes) % 256 == 0);
    const uint32_t table = sizeof(Shared::codes) + lane.warp * TABLE_BYTES;
    return pack(memory[__byte_perm(word, table, 0x7650)], memory[__byte_perm(word, table, 0x7651)],
                memory[__byte_perm(word, table, 0x7652)], memory[__byte_perm(word, table, 0x7653)]);
  }
};

// A lane's values, without their block's last scale, and the table of those of codes, 0 midway.
struct ByValue {
  float values[TALL][WIDE];

  static DEVICE void prepare(uint8_t* table, const Lane& lane) {
    if (lane.index == 0) middle(table)[0] = AT_ZERO;
  }

  static DEVICE float* middle(uint8_t* table) {
    return reinterpret_cast<float*>(table + TABLE_BYTES / 2);
  }

  static DEVICE void tabulate(float* middle, const Curve& curve, const Lane& lane) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int a = lane.index + 1 + 32 * j;
      const Pair pair = curve(float(a));
      middle[a] = pair.plus;
      middle[-a] = pair.minus;
    }
  }

  DEVICE float read(uint8_t* table, const Tile& tile, int part, const Curve& curve, bool anew,
                    const Lane& lane) {
    if (anew) {
      __syncwarp();
      tabulate(middle(table), curve, lane);
      __syncwarp();
    }
    float most = 0;
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
      const uint2 x = lane.codes(tile, 0, part, k);
      float dy[WIDE];
      if constexpr (BACKWARD) to_floats(dy, lane.codes(tile, 1, part, k));
#pragma unroll
      for (int j = 0; j < WIDE; ++j) {
        // A dot product with one of a word's bytes adds four times the code to the address.
        const int word = j < 4 ? x.x : x.y;
        const float entry = load_shared_float(__dp4a(word, 4 << j % 4 * 8, lane.middle));
        values[k][j] = BACKWARD ? dy[j] * entry : entry;
        most = fmaxf(most, fabsf(values[k][j]));
      }
    }
    return __uint_as_float(__reduce_max_sync(ALL, __float_as_uint(most)));
  }

  DEVICE void write(uint2 (&to)[TALL], uint8_t*, const Curve&, float multiplier, bool,
                    uint64_t seed, int row, int column, const Lane& lane) const {
    Words words[TALL];
    if constexpr (STOCHASTIC) {
      const int rows[TALL] = {row + lane.row_at(0), row + lane.row_at(1), row + lane.row_at(2),
                              row + lane.row_at(3)};
      draw(words, seed, rows, column + lane.column);
    }
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

DEVICE void store(const uint2 (&codes)[TALL], int row0, int column0, const Arguments& p,
                  const Lane& lane) {
  const int row = row0 + (lane.row & ~2), column = column0 + lane.column;
  // Of words all codes are within the matrix, or none.
  const int rows = QT_ACCESS == TALL ? (row < p.m ? TALL : 0) : p.m - row;
  const int columns = Q_ACCESS == WIDE ? (column < p.n ? WIDE : 0) : p.n - column;
  if constexpr (WRITES_Q) {
    uint8_t* q = p.q + int64_t(row0 + lane.row) * p.n + column;
    const int64_t two = int64_t(p.n) * (lane.exchanged ? -2 : 2);
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
      uint8_t* to = q + (k < 2 ? 0 : two) + k % 2 * p.n;
      const bool inside = QT_ACCESS == TALL ? rows > 0 : row0 + lane.row_at(k) < p.m;
      if (inside) store_row<Q_ACCESS>(to, codes[k], columns);
    }
  }
  if constexpr (WRITES_QT) {
    uint32_t words[WIDE / 4][4];
    transpose(words[0], codes[0].x, codes[1].x, codes[2].x, codes[3].x, lane.exchanged);
    transpose(words[1], codes[0].y, codes[1].y, codes[2].y, codes[3].y, lane.exchanged);
    uint8_t* qt = p.qt + int64_t(column) * p.m + row;
#pragma unroll
    for (int j = 0; j < WIDE; ++j, qt += p.m) {
      if (j < columns) store_column<QT_ACCESS>(qt, words[j / 4][j % 4], rows);
    }
  }
}

// The scale of a block of the output, by the warp whose first part is the block's.
DEVICE void store_scale(float scale, int part, const Place& place, const Arguments& p,
                        const Lane& lane) {
  const int row = place.row * TILE + row_of(part), column = place.column * TILE + column_of(part);
  const bool first = row_of(part) % OUT_BLOCK == 0 && column_of(part) % OUT_BLOCK == 0;
  if (!first || lane.index != 0 || row >= p.m || column >= p.n) return;
  const int64_t i = row / OUT_BLOCK, j = column / OUT_BLOCK;
  if (WRITES_Q) p.scale[i * ceil_div(p.n, OUT_BLOCK) + j] = scale;
  if (WRITES_QT) p.scale_t[j * ceil_div(p.m, OUT_BLOCK) + i] = scale;
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
      const float x_scale = tile.scale(0, part + b);
      const float last = tile.scale(OPERANDS - 1, part + b);
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
          const Curve curve(finite_or_zero(tile.scale(0, part + b)));
          most[b] = Part::most(tile, part + b, curve, lane) * factor[b];
        }
        all = largest(shared.most[1], most, part, lane);
      }
    }
    float scale, multiplier;
    block_scale(__float_as_uint(all * UNIT), scale, multiplier);
    store_scale(scale, part, place, p, lane);
    // Products of factors and of the largest value round thrice: stochastic rounding wants less
    // than 127.
    multiplier *= STOCHASTIC ? UNIT * 0.9999995f : UNIT;
#pragma unroll
    for (int b = 0; b < HELD; ++b) {
      const int row = place.row * TILE + row_of(part + b);
      const int column = place.column * TILE + column_of(part + b);
      // Where it is infinite all codes are 0.
      const float of_part = fminf(factor[b] * multiplier, LARGEST);
      const Curve curve(finite_or_zero(tile.scale(0, part + b)));
      uint2 codes[TALL];
      held[b].write(codes, table, curve, of_part, b == 0 || BLOCK == SIDE, seed, row,
                    column, lane);
      store(codes, row, column, p, lane);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    tiles(const __grid_constant__ Arguments p) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Lane lane(shared);
  const uint64_t seed = STOCHASTIC ? *p.seed : 0;
  const int down = ceil_div(p.m, TILE), across = ceil_div(p.n, TILE);
  const Place step(gridDim.x, across);
  Place place(blockIdx.x, across), ahead = place;
  if (TMA && threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) barrier_init(shared_address(&shared.arrived[i]), 1);
    fence_barrier_init();
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i, ahead.advance(step, across)) {
    if (ahead.row < down) fetch(shared, i, ahead, p);
    copy_commit();
  }
  if constexpr (!BY_CODE) ByValue::prepare(shared.tables[lane.warp], lane);
  int stage = 0;
  uint32_t lap = 0;  // around the stages
#pragma unroll 1
  for (; place.row < down; place.advance(step, across), ahead.advance(step, across)) {
    copy_wait<STAGES - 2>();
    if (TMA) barrier_wait(shared_address(&shared.arrived[stage]), lap % 2);
    __syncthreads();  // the tile is there for all, and all are done with the one before it
    if (ahead.row < down) fetch(shared, stage ? stage - 1 : STAGES - 1, ahead, p);
    copy_commit();
    const Tile tile(shared, stage);
    if constexpr (BY_CODE) turn<ByCode>(shared, tile, place, seed, p, lane);
    else turn<ByValue>(shared, tile, place, seed, p, lane);
    if (++stage == STAGES) stage = 0, ++lap;
  }
}
