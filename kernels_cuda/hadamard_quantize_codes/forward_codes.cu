// Transform, multiply, round: the 4-bit codes of a matrix in INT8, as jetfire.reference's
// quantize_codes has them to the bit.
//
// A run lies within a block, whose scale is in its multiplier. Sums are of integers, and exact.
#include "hadamard_rows.cuh"

struct Arguments {
  const uint8_t* q;
  const float* scale;
  const float* step;
  uint8_t* packed;
  uint8_t* wide;
  float* unit;
  int32_t* squares;
  uint32_t* counters;           // two, that are zero before and after a launch
  int64_t pitch, scale_stride;  // from row to row: bytes of q, elements of scale
  int32_t m, n;
};

static_assert(BLOCK % ELEMENTS == 0 && GROUP <= BLOCK, "runs and groups lie within a block");

struct Tile {
  Raw<8> codes;
  float scale[CHUNKS];  // of each run's block; 0 past the row's end
};

DEVICE void load_tile(Tile& tile, const uint8_t* q, const float* scale, int column, int columns) {
  load<8, X_BYTES>(tile.codes, q, column, columns);
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int at = column + c * RUN;
    tile.scale[c] = at < columns ? __ldg(scale + uint32_t(at) / BLOCK) : 0.0f;
  }
}

// Codes come as 2^15 + 128 + code, floats whose second byte is the code's with its sign flipped: a
// conversion is a slower instruction. Of what is added to all alike a transform has all in a
// group's first element. Sums of 128 such floats are integers below 2^24.
constexpr float ADDED = GROUP * 32896.0f;
constexpr uint32_t FLOAT = 0x47000000;  // 2^15

DEVICE void unpack_codes(Values& v, const Raw<8>& codes) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < ELEMENTS / 4; ++i) {
      const uint32_t flipped = codes[c][i] ^ 0x80808080u;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        v[c][4 * i + j] = __uint_as_float(__byte_perm(flipped, FLOAT, 0x7404 | j << 4));
      }
    }
  }
}

// `first`: the thread has the first element of each of its groups that begin with a run.
DEVICE void subtract_added(Values& v, bool first) {
  constexpr int STRIDE = GROUP < ELEMENTS ? GROUP : ELEMENTS;
  const float added = first ? ADDED : 0.0f;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    if (c * RUN % GROUP && GROUP > RUN) continue;
#pragma unroll
    for (int j = 0; j < ELEMENTS; j += STRIDE) v[c][j] = __fsub_rn(v[c][j], added);
  }
}

// Write the codes of a run as `packed` or `wide` has them, and add up their squares.
DEVICE void write_run(uint8_t* packed, uint8_t* wide, const float (&v)[ELEMENTS], float ratio,
                      int column, int columns, int& squares) {
  uint32_t bytes[ELEMENTS / 4], nibbles[ELEMENTS / 8];
#pragma unroll
  for (int i = 0; i < ELEMENTS / 4; ++i) {
    bytes[i] = bytes_of(&v[4 * i], ratio);
    squares = __dp4a(int(bytes[i]), int(bytes[i]), squares);
  }
#pragma unroll
  for (int i = 0; i < ELEMENTS / 8; ++i) {
    nibbles[i] = nibbles_of(bytes[2 * i], bytes[2 * i + 1]);
  }
  if (PACKED) store<4, PACKED_BYTES>(packed, nibbles, column, columns);
#pragma unroll
  for (int i = 0; i < ELEMENTS / 4; ++i) bytes[i] = bytes[i] << 4 & 0xF0F0F0F0u;
  if (WIDE) store<8, WIDE_BYTES>(wide, bytes, column, columns);
}

// The squares of a run's codes past the row's end: −8 where a multiplier is not finite, else 0.
DEVICE int squares_beyond(float ratio, int column, int columns) {
  if (X_BYTES >= ELEMENTS) return 0;  // runs end where rows do
  return ratio - ratio == 0 ? 0 : 64 * max(column + ELEMENTS - columns, 0);
}

// The block that is the last to end writes the unit: NaN if any saw a fault. Blocks that saw none
// need no fence, for which their stores would have to end first.
DEVICE void write_unit(const Arguments& p, float step, bool bad) {
  const bool faulty = __syncthreads_or(bad);
  if (threadIdx.x) return;
  if (faulty) {
    atomicExch(&p.counters[0], 1u);
    __threadfence();
  }
  const uint32_t last = gridDim.x - 1;
  if (atomicInc(&p.counters[1], last) != last) return;
  __threadfence();
  const bool any = atomicExch(&p.counters[0], 0u);
  *p.unit = any ? __int_as_float(0x7FC00000) : step;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) forward_codes(const Arguments p) {
  const int lane = threadIdx.x % LANES;
  const int64_t row = int64_t(blockIdx.x) * ROWS + threadIdx.x / LANES;
  const int columns = row < p.m ? p.n : 0;
  const uint8_t* q = p.q + row * p.pitch;
  const float* scale = p.scale + row / BLOCK * p.scale_stride;
  keep(q);
  keep(scale);
  uint8_t* packed = p.packed + row * (p.n / 2);
  uint8_t* wide = p.wide + row * p.n;
  const float step = *p.step, inverse = multiplier(step);
  const bool first = lane * ELEMENTS % GROUP == 0;
  float fault = 0;
  int squares = 0;

  Tile tile;
  int column = lane * ELEMENTS;
  if (PREFETCH) load_tile(tile, q, scale, column, columns);
#pragma unroll 1
  for (int start = 0; start < p.n; start += TILE, column += TILE) {
    if (!PREFETCH) load_tile(tile, q, scale, column, columns);
    Values v;
    unpack_codes(v, tile.codes);
    float ratio[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      fault = __fmaf_rn(tile.scale[c], 0.0f, fault);  // NaN of what is not finite
      ratio[c] = __fmul_rn(tile.scale[c], inverse);
    }
    if (PREFETCH) load_tile(tile, q, scale, column + TILE, columns);
    butterflies(v, lane);
    subtract_added(v, first);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int at = column + c * RUN;
      write_run(packed, wide, v[c], ratio[c], at, columns, squares);
      squares -= squares_beyond(ratio[c], at, columns);
    }
  }

  squares = sum_of_row(squares);
  if (lane == 0 && row < p.m) p.squares[row] = squares;
  write_unit(p, step, inverse == 0 || fault != fault);
}
