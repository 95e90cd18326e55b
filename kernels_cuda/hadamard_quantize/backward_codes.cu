// The quantiser's gradient as INT8 codes: what backward.cu makes of packed codes, rounded to its
// float type as there, and then quantised in blocks as jetfire.reference's quantize has it.
//
// A block of the grid has whole blocks of the output: of each tile DOWN·ACROSS. A thread's run lies
// in one of them, with the runs of SHARE neighbouring lanes in each of OUT_BLOCK rows.
#include "gradient.cuh"

struct Arguments {
  const uint8_t* dx_hat;
  const uint8_t* given;  // packed codes
  const int32_t* slots;
  const float* unit;
  const uint64_t* seed;
  uint8_t* dx;
  float* dx_scale;
  int64_t pitch, given_pitch;  // bytes from row to row of dx_hat and of what is given
  int64_t slots_stride;
  int32_t m, n;
};

constexpr int ACROSS = TILE / OUT_BLOCK, DOWN = ROWS / OUT_BLOCK, SHARE = OUT_BLOCK / ELEMENTS;
static_assert(RUN % OUT_BLOCK == 0 && ROWS % OUT_BLOCK == 0, "blocks lie within runs and rows");

// By block of a tile the largest magnitude, as the bits of floats: these order as the floats do,
// and NaN above all.
using Largest = uint32_t[DOWN * ACROSS];

DEVICE void clear(Largest& largest) {
  static_assert(DOWN * ACROSS <= 32 * WARPS, "a thread has less than a block");
  if (threadIdx.x < DOWN * ACROSS) largest[threadIdx.x] = 0;
}

// The largest magnitude of the warp's part of the block that a run lies in, NaN above all. Past the
// matrix there may be NaN, where the rows that are not there add it: that does not count.
DEVICE float largest_of_warp(const float (&run)[ELEMENTS], int column, int columns) {
  float most = 0;
#pragma unroll
  for (int at = 0; at < ELEMENTS; at += DX_BYTES) {
    float piece = 0;
#pragma unroll
    for (int j = 0; j < DX_BYTES; ++j) piece = max_nan(piece, fabsf(run[at + j]));
    if (column + at < columns) most = max_nan(most, piece);
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    if (step >= SHARE && step < LANES) continue;  // lanes of the row's other blocks
    most = max_nan(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
  }
  return most;
}

// The bits of a float, rounded to dx's type.
DEVICE uint32_t rounded(float x) {
  if constexpr (DX_TYPE == FP32) return __float_as_uint(x);
  const uint32_t pair = DX_TYPE == FP16 ? pack_fp16(x, x) : pack_bf16(x, x);
  return __float_as_uint(unpack<DX_TYPE>(&pair, 0));
}

// A run's codes. Those of a block that is not finite are 0.
DEVICE void quantise(uint32_t (&codes)[ELEMENTS / 4], const uint32_t (&run)[ELEMENTS * DX_BITS / 32],
                     float multiplier, uint64_t seed, uint32_t row, int column) {
#pragma unroll
  for (int i = 0; i < ELEMENTS / 8; ++i) {
    Words words;
    if constexpr (STOCHASTIC) words = philox(seed, column / 8 + i, row);
    uint32_t k[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float product = __fmul_rn(unpack<DX_TYPE>(run, 8 * i + j), multiplier);
      if constexpr (STOCHASTIC) k[j] = code_stochastic(product, words.w[j / 2], j % 2);
      else k[j] = code_nearest(product);
    }
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      const uint32_t low = __byte_perm(k[j], k[j + 1], 0x0040);
      const uint32_t high = __byte_perm(k[j + 2], k[j + 3], 0x0040);
      const uint32_t four = __byte_perm(low, high, 0x5410);
      codes[2 * i + j / 4] = multiplier != 0 ? four : 0;
    }
  }
}

// Of codes that were rounded stochastically, −128 as −127. It is rare, and a byte that is positive
// once it is one less; of −127 that may be said, too, as the byte below it borrows.
DEVICE void clamp(uint32_t (&codes)[ELEMENTS / 4]) {
  uint32_t found = 0;
#pragma unroll
  for (int i = 0; i < ELEMENTS / 4; ++i) found |= codes[i] & ~(codes[i] - 0x01010101u);
  if (!(found & 0x80808080u)) return;
#pragma unroll
  for (int i = 0; i < ELEMENTS / 4; ++i) codes[i] = __vmaxs4(codes[i], 0x81818181u);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) backward_codes(const Arguments p) {
  // Of a tile; of the next, which other warps may be at; of the one before, to be cleared.
  __shared__ Largest largest[3];
  const int lane = threadIdx.x % LANES, within = threadIdx.x / LANES;
  const int64_t row = int64_t(blockIdx.x) * ROWS + within;
  const int columns = row < p.m ? p.n : 0;
  Source source = source_of(p, row, columns);
  const uint8_t* given = p.given + row * p.given_pitch;
  uint8_t* dx = p.dx + row * p.n;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) keep(source.row[i]);
  float* dx_scale = p.dx_scale + row / OUT_BLOCK * ceil_div(p.n, OUT_BLOCK);
  const uint64_t seed = STOCHASTIC ? *p.seed : 0;
  const bool first_lane = lane % SHARE == 0;
  const bool of_warp = first_lane && threadIdx.x % 32 < LANES;
  const bool of_block = first_lane && within % OUT_BLOCK == 0;
  const int place = within / OUT_BLOCK * ACROSS + lane / SHARE;
#pragma unroll
  for (int i = 0; i < 3; ++i) clear(largest[i]);
  __syncthreads();

  Tile tile;
  int column = lane * ELEMENTS, turn = 0;
  if (PREFETCH) load_tile(tile, source, given, column, columns);
#pragma unroll 1
  for (int start = 0; start < p.n; start += TILE, column += TILE) {
    if (!PREFETCH) load_tile(tile, source, given, column, columns);
    Values v;
    mark(tile, source);
    mask_by_codes<true>(v, tile, source);
    if (PREFETCH) load_tile(tile, source, given, column + TILE, columns);
    butterflies(v, lane);
    uint32_t words[CHUNKS][ELEMENTS * DX_BITS / 32];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
      for (int j = 0; j < ELEMENTS; ++j) {
        v[c][j] = __fmul_rn(v[c][j], __int_as_float(FACTOR_BITS));
      }
      const float most = largest_of_warp(v[c], column + c * RUN, columns);
      const int at = place + c * (RUN / OUT_BLOCK);
      if (of_warp) atomicMax(&largest[turn][at], __float_as_uint(most));
      pack<DX_TYPE>(words[c], v[c]);
    }
    __syncthreads();
    const int next = turn < 2 ? turn + 1 : 0, last = next < 2 ? next + 1 : 0;
    clear(largest[last]);  // which all have read, and none adds to before they meet again
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int at = place + c * (RUN / OUT_BLOCK), from = column + c * RUN;
      // Rounding keeps the order: it is the largest of what was rounded, too.
      const uint32_t amax = rounded(__uint_as_float(largest[turn][at]));
      float scale, multiplier;
      block_scale(amax, scale, multiplier);
      if (of_block && from < columns) dx_scale[from / OUT_BLOCK] = scale;
      uint32_t codes[ELEMENTS / 4];
      quantise(codes, words[c], multiplier, seed, uint32_t(row), from);
      if (STOCHASTIC) clamp(codes);
      store<8, DX_BYTES>(dx, codes, from, columns);
    }
    turn = next;
  }
}
