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
#include "curve.cuh"
#include "tile_codes.cuh"

constexpr int OPERANDS = BACKWARD ? 2 : 1;
constexpr bool BY_CODE = !BACKWARD && !STOCHASTIC;
constexpr int TABLE_BYTES = BY_CODE ? 256 : FLOAT_TABLE;
// Of values. In it all are finite: whether one overflows fp32, its block's scale says.
constexpr float UNIT = 0x1p14f;

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
  uint8_t codes[STAGES][OPERANDS][TILE * TILE];
  uint8_t tables[WARPS][TABLE_BYTES];
  float scales[STAGES][OPERANDS][PARTS_OF_TILE];
  uint32_t most[2][PARTS_OF_TILE];  // the bits of parts' largest values
  uint64_t arrived[STAGES];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "as the host counts them");

// --- a part --------------------------------------------------------------------------------------

// A lane's codes, and the table of those to write for them.
struct ByCode {
  uint2 codes[TALL];

  // Return the value of the part's largest code if that is above 0.
  DEVICE float read(uint8_t*, const Tile& tile, int part, const Curve& curve, bool,
                    const TableLane& lane) {
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
  static DEVICE float most(const Tile& tile, int part, const Curve& curve, const TableLane& lane) {
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
                              const TableLane& lane) {
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
                    bool anew, uint64_t, int, int, const TableLane& lane) const {
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
  static DEVICE uint32_t look_up(uint32_t word, const TableLane& lane) {
    static_assert(sizeof(Shared::codes) % 256 == 0);
    const uint32_t table = sizeof(Shared::codes) + lane.warp * TABLE_BYTES;
    return pack(memory[__byte_perm(word, table, 0x7650)], memory[__byte_perm(word, table, 0x7651)],
                memory[__byte_perm(word, table, 0x7652)], memory[__byte_perm(word, table, 0x7653)]);
  }
};

// A lane's values, without their block's last scale, and the table of those of codes, 0 midway.
struct ByValue {
  float values[TALL][WIDE];

  static DEVICE void prepare(uint8_t* table, const TableLane& lane) {
    if (lane.index == 0) middle_of(table)[0] = AT_ZERO;
  }

  DEVICE float read(uint8_t* table, const Tile& tile, int part, const Curve& curve, bool anew,
                    const TableLane& lane) {
    if (anew) {
      __syncwarp();
      tabulate(table, curve, lane);
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
        const float entry = lane.look_up(x, j);
        values[k][j] = BACKWARD ? dy[j] * entry : entry;
        most = fmaxf(most, fabsf(values[k][j]));
      }
    }
    return __uint_as_float(__reduce_max_sync(ALL, __float_as_uint(most)));
  }

  DEVICE float at(int k, int j) const { return values[k][j]; }

  DEVICE void write(uint2 (&to)[TALL], uint8_t*, const Curve&, float multiplier, bool,
                    uint64_t seed, int row, int column, const TableLane& lane) const {
    quantise<false>(to, *this, multiplier, seed, row, column, lane);
  }
};

// --- a tile --------------------------------------------------------------------------------------

template <class Part>
DEVICE void turn(Shared& shared, const Tile& tile, const Place& place, uint64_t seed,
                 const Arguments& p, const TableLane& lane) {
  uint8_t* table = shared.tables[lane.warp];
#pragma unroll 1
  for (int begin = 0; begin < PARTS; begin += HELD) {
    const int part = lane.warp * PARTS + begin;
    Part held[HELD];
    float factor[HELD], bad[HELD];
    uint32_t most[HELD];
#pragma unroll
    for (int b = 0; b < HELD; ++b) {
      const float x_scale = tile.scale(0, part + b);
      const float last = tile.scale(OPERANDS - 1, part + b);
      const Curve curve(finite_or_zero(x_scale));
      // Parts that lie side by side are of one block if that is larger.
      const bool anew = b == 0 || BLOCK == SIDE;
      factor[b] = finite_or_zero(last) * (1 / UNIT);
      bad[b] = x_scale * 0.0f + last * 0.0f;  // NaN where a scale is not finite
      const float found = held[b].read(table, tile, part + b, curve, anew, lane);
      most[b] = __float_as_uint(found * factor[b] + bad[b]);
    }
    float all = __uint_as_float(largest(shared.most[0], most, part, lane));
    if constexpr (BY_CODE) {
      if (all * UNIT < DIP) {  // for all warps that share a block
#pragma unroll
        for (int b = 0; b < HELD; ++b) {
          const Curve curve(finite_or_zero(tile.scale(0, part + b)));
          most[b] = __float_as_uint(Part::most(tile, part + b, curve, lane) * factor[b]);
        }
        all = __uint_as_float(largest(shared.most[1], most, part, lane));
      }
    }
    float scale, multiplier;
    block_scale(__float_as_uint(all * UNIT), scale, multiplier);
    store_scale(scale, part, place.row * TILE + row_of(part),
                place.column * TILE + column_of(part), p, lane);
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
  const TableLane lane(shared.tables[threadIdx.x / 32]);
  const uint64_t seed = STOCHASTIC ? *p.seed : 0;
  const int down = ceil_div(p.m, TILE), across = ceil_div(p.n, TILE);
  const Place step(gridDim.x, across);
  Place place(blockIdx.x, across), ahead = place;
  prepare(shared);
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i, ahead.advance(step, across)) {
    if (ahead.row < down) fetch_codes(shared, i, ahead.row * TILE, ahead.column * TILE, p);
    copy_commit();
  }
  if constexpr (!BY_CODE) ByValue::prepare(shared.tables[lane.warp], lane);
  int stage = 0;
  uint32_t lap = 0;  // around the stages
#pragma unroll 1
  for (; place.row < down; place.advance(step, across), ahead.advance(step, across)) {
    wait(shared, stage, lap);
    if (ahead.row < down) {
      const int next = stage ? stage - 1 : STAGES - 1;
      fetch_codes(shared, next, ahead.row * TILE, ahead.column * TILE, p);
    }
    copy_commit();
    const Tile tile(shared, stage);
    if constexpr (BY_CODE) turn<ByCode>(shared, tile, place, seed, p, lane);
    else turn<ByValue>(shared, tile, place, seed, p, lane);
    if (++stage == STAGES) stage = 0, ++lap;
  }
}
