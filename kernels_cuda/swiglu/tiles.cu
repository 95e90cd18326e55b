// silu(gate)·up, or its gradients if BACKWARD, from blocks of INT8 codes to others, in tiles of
// 128×128.
//
// Blocks of the grid go over tiles, one turn each, while the next tiles are on their way to shared
// memory. A tile is 16 parts of 32×32 codes, of which a warp has PARTS, side by side. A part has
// one scale of the gate, so that a table over its 256 codes may take the place of the formula at
// each element. A warp makes its own. A warp's 32 look-ups take 2.8 passes of shared memory, as
// some share a bank, of codes of normal numbers: where these are what bounds a kernel, silu may be
// better evaluated, which takes three instructions more. So LOOKED_UP is a choice; values are the
// same.
//
// A lane keeps its values until the largest of the block that is written is known, to all warps
// that have a part of it. Of both gradients at once they would be 128 in blocks of more than a
// part, so dup is written first, then dgate from the codes anew.
#include "code_tables.cuh"
#include "tile_codes.cuh"

constexpr int OPERANDS = BACKWARD ? 3 : 2;
// Of values. In it all are finite: whether one overflows fp32, its block's scale says.
constexpr float UNIT = 0x1p15f;

struct Written {
  uint8_t* q;
  float* scale;
  uint8_t* qt;
  float* scale_t;
  int64_t pitch, scale_pitch;  // elements from row to row of q and scale
  int32_t m, n;
};

DEVICE int64_t pitch_of(const Written& to) { return to.pitch; }
DEVICE int64_t scale_pitch_of(const Written& to) { return to.scale_pitch; }

struct Arguments {
  TensorMap maps[3];   // of the inputs' codes, in boxes of a tile; if TMA
  Matrix inputs[3];    // gate, up, and if BACKWARD dy
  Written outputs[2];  // y, or dgate and dup
  const uint64_t* seed;
  int32_t m, n;
};

struct Shared {
  uint8_t codes[STAGES][OPERANDS][TILE * TILE];
  uint8_t tables[WARPS][FLOAT_TABLE];
  float scales[STAGES][OPERANDS][PARTS_OF_TILE];
  uint32_t most[2][PARTS_OF_TILE];  // the bits of parts' largest values, by output
  uint64_t arrived[STAGES];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "as the host counts them");

// --- what is written -----------------------------------------------------------------------------

// An output is a code of OTHER, and of up if STEEP, times the curve at the gate, times the scales
// of FIRST and OTHER.
struct Y {
  static constexpr int OUTPUT = 0, FIRST = 0, OTHER = 1, STREAM = 0;
  static constexpr bool STEEP = false;
};
struct Dup {
  static constexpr int OUTPUT = 1, FIRST = 0, OTHER = 2, STREAM = 3;
  static constexpr bool STEEP = false;
};
struct Dgate {
  static constexpr int OUTPUT = 0, FIRST = 1, OTHER = 2, STREAM = 0;
  static constexpr bool STEEP = true;
};

// silu(s·q)/s, or silu'(s·q) if STEEP, at codes of a block of scale s.
template <bool STEEP>
struct Curve {
  static constexpr float AT_ZERO = STEEP ? 0.5f : 0.0f;
  static constexpr bool TABLE = STEEP || LOOKED_UP;
  float s, power;

  // A scale beyond 1000 gives what 1000 does, 0 or z; of an infinite z, z·σ(−z) would be NaN.
  DEVICE explicit Curve(float scale) : s(fminf(scale, 1e3f)), power(s * -LOG2E) {}

  DEVICE float silu(float q) const { return q * reciprocal_fast(1.0f + exp2_fast(q * power)); }

  // Of silu' both ends share the exponential: σ(−z) = e·σ(z) with e = exp(−z), and silu'(z) is
  // σ(z)·(1 + z·σ(−z)). Of silu they would have other bits than one alone.
  DEVICE Pair operator()(float a) const {
    if constexpr (!STEEP) return {silu(a), silu(-a)};
    const float e = exp2_fast(a * power), z = a * s;
    const float open = reciprocal_fast(1.0f + e), shut = e * open;
    return {open * __fmaf_rn(z, shut, 1.0f), shut * __fmaf_rn(-z, open, 1.0f)};
  }
};

// --- a part --------------------------------------------------------------------------------------

// The products of two words' codes. A dot product with all but one byte masked adds theirs to the
// bits of 1.5·2^23: three instructions where two conversions and a product are five.
DEVICE void products(float (&to)[WIDE], uint2 a, uint2 b) {
#pragma unroll
  for (int j = 0; j < WIDE; ++j) {
    const uint32_t one = (j < 4 ? a.x : a.y) & 0xFFu << j % 4 * 8;
    const int sum = __dp4a(int(one), int(j < 4 ? b.x : b.y), __float_as_int(INTEGER));
    to[j] = __int_as_float(sum) - INTEGER;
  }
}

// A lane's values, without their block's scales.
template <class Of>
struct Values {
  float values[TALL][WIDE];

  // Return the largest magnitude in the part. `anew`: the warp's table is of another block's gate.
  DEVICE float read(uint8_t* table, const Tile& tile, int part, bool anew, const TableLane& lane) {
    const Curve<Of::STEEP> curve(finite_or_zero(tile.scale(0, part)));
    if (curve.TABLE && anew) {
      __syncwarp();
      if (lane.index == 0) middle_of(table)[0] = curve.AT_ZERO;
      tabulate(table, curve, lane);
      __syncwarp();
    }
    float most = 0;
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
      const uint2 gate = lane.codes(tile, 0, part, k);
      const uint2 other = lane.codes(tile, Of::OTHER, part, k);
      float gates[WIDE], factors[WIDE];
      if constexpr (!curve.TABLE) to_floats(gates, gate);
      if constexpr (Of::STEEP) products(factors, other, lane.codes(tile, 1, part, k));
      else to_floats(factors, other);
#pragma unroll
      for (int j = 0; j < WIDE; ++j) {
        values[k][j] = factors[j] * (curve.TABLE ? lane.look_up(gate, j) : curve.silu(gates[j]));
        most = fmaxf(most, fabsf(values[k][j]));
      }
    }
    return __uint_as_float(__reduce_max_sync(ALL, __float_as_uint(most)));
  }

  DEVICE float at(int k, int j) const { return values[k][j]; }
};

// --- a tile --------------------------------------------------------------------------------------

// A part's two scales as one factor; `most` is NaN where a scale that counts is not finite.
template <class Of>
DEVICE float factor_of(const Tile& tile, int part, float found, uint32_t& most) {
  const float first = tile.scale(Of::FIRST, part), other = tile.scale(Of::OTHER, part);
  // Where the product overflows every value does, or is 0. Where it is lost all are below 2^-100.
  const float both = fminf(finite_or_zero(first) * finite_or_zero(other), LARGEST);
  float bad = first * 0.0f + other * 0.0f;
  if constexpr (Of::STEEP) bad += tile.scale(0, part) * 0.0f;
  const float factor = both * (1 / UNIT);
  most = __float_as_uint(found * factor + bad);
  return factor;
}

// Write one output of a warp's parts from `part` on.
template <class Of>
DEVICE void write(Shared& shared, const Tile& tile, const Place& place, int part, uint64_t seed,
                  const Arguments& p, const TableLane& lane) {
  const Written& to = p.outputs[Of::OUTPUT];
  Values<Of> held[HELD];
  float factor[HELD];
  uint32_t most[HELD];
#pragma unroll
  for (int b = 0; b < HELD; ++b) {
    // Parts that lie side by side are of one block if that is larger.
    const bool anew = b == 0 || BLOCK == SIDE;
    const float found = held[b].read(shared.tables[lane.warp], tile, part + b, anew, lane);
    factor[b] = factor_of<Of>(tile, part + b, found, most[b]);
  }
  const float all = __uint_as_float(largest(shared.most[Of::OUTPUT], most, part, lane));
  float scale, multiplier;
  block_scale(__float_as_uint(all * UNIT), scale, multiplier);
  const int row = place.row * TILE + row_of(part), column = place.column * TILE + column_of(part);
  store_scale(scale, part, row, column, to, lane);
  // Products of factors and of the largest value round four times: stochastic rounding wants less
  // than 127.
  multiplier *= STOCHASTIC ? UNIT * 0.9999995f : UNIT;
  // Where one is infinite all values are below 2^-100 of their scales, and any codes are right.
#pragma unroll
  for (int b = 0; b < HELD; ++b) factor[b] = fminf(factor[b] * multiplier, LARGEST);
#pragma unroll
  for (int b = 0; b < HELD; ++b) {
    uint2 codes[TALL];
    quantise<false>(codes, held[b], factor[b], seed, row, column + b * SIDE, lane, Of::STREAM);
    store(codes, row, column + b * SIDE, to, lane);
  }
}

DEVICE void turn(Shared& shared, const Tile& tile, const Place& place, uint64_t seed,
                 const Arguments& p, const TableLane& lane) {
#pragma unroll 1
  for (int begin = 0; begin < PARTS; begin += HELD) {
    int part = lane.warp * PARTS + begin;
    if constexpr (BACKWARD) {
      write<Dup>(shared, tile, place, part, seed, p, lane);
      // Or registers would keep addresses of dup's for dgate, and others spill.
      if constexpr (OUT_BLOCK == 64) asm volatile("" : "+r"(part));
      write<Dgate>(shared, tile, place, part, seed, p, lane);
    } else {
      write<Y>(shared, tile, place, part, seed, p, lane);
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
    turn(shared, Tile(shared, stage), place, seed, p, lane);
    if (++stage == STAGES) stage = 0, ++lap;
  }
}
