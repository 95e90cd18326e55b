// Per-block INT8 GEMM for sm_80 and later: C (m×n) = A (m×k) · Bᵀ (n×k), a scale for each
// BLOCK×BLOCK tile, and for each OUT_BLOCK×OUT_BLOCK tile of C where that is written as codes.
//
// A block of WARPS_M×WARPS_N warps makes one tile of TILE_M×TILE_N; two or more of them share an SM
// where they fit, so that one finishes while another multiplies. In order:
//
//   1. place:    which tile this is; its code and the ring's are in mma_tiles.cuh. RASTER rows of
//                tiles are walked column by column, so that L2 holds what neighbours share.
//   2. load:     all threads keep a ring of STAGES slots full, each 128 of K deep: the codes by
//                cp.async in 16 bytes, or as few as their alignment allows, zeros beyond the edges;
//                the scales beside them. Rows of 128 bytes have their 16-byte chunks permuted by
//                the row's number, so that neither copies nor ldmatrix meet a bank twice.
//   3. multiply: each warp keeps WARP_M×WARP_N. Per BLOCK of K it holds B's fragments and goes down
//                its rows sixteen at a time: int32 sums on the tensor cores, from nothing, then
//   4. promote:  acc += (sA·sB)·float(S), one rounding a block, as the reference rounds. No sum
//                outlives this, so that registers hold the fp32 ones almost alone.
//   5. finish:   bias, cast or requantisation, and through the ring's memory to rows of 16 bytes.
//
// BIASED sums start at the bits of 12582912.0f, where that float's binade has room for all that 128
// of K can add: read as a float they are 12582912 + S, and a subtraction, which is exact, replaces
// the conversion, which has half an addition's rate on sm_89 and sm_90, or less.
#define CHUNK_WARPS 1
#include "block_epilogue.cuh"
#include "mma_tiles.cuh"

constexpr int TILE_K = TILE_BYTES;  // in a slot: codes are bytes
constexpr int PROMOTIONS = TILE_K / BLOCK;
constexpr int DEPTH = BLOCK / 32;        // products of 32 of K in a promotion
constexpr int BASE = 0x4B400000;         // the bits of
constexpr float BASE_FLOAT = 12582912.0f;

// Scales of a slot: for each promotion, A's and then B's.
constexpr int A_SCALES = TILE_M > BLOCK ? TILE_M / BLOCK : 1;
constexpr int B_SCALES = TILE_N > BLOCK ? TILE_N / BLOCK : 1;
constexpr int SCALES = A_SCALES + B_SCALES;
constexpr int FACTORS = WARP_N > BLOCK ? WARP_N / BLOCK : 1;  // of sixteen rows, for a promotion

// Blocks of codes that a tile holds down and across, and sixteen rows of a warp across.
constexpr int CODES_DOWN = TILE_M > OUT_BLOCK ? TILE_M / OUT_BLOCK : 1;
constexpr int CODES_ACROSS = TILE_N > OUT_BLOCK ? TILE_N / OUT_BLOCK : 1;
constexpr int CODE_BLOCKS = WARP_N > OUT_BLOCK ? WARP_N / OUT_BLOCK : 1;
constexpr int AMAXES = OUTPUT == INT8 ? CODES_DOWN * CODES_ACROSS : 0;
static_assert(AMAXES <= THREADS, "a thread sets each to zero");

// What a warp sends through shared memory at the end: sixteen rows of floats or codes, and all of
// its transposed codes.
constexpr int ROW_BYTES = WARP_N * ELEMENT_BYTES;
constexpr int OUT_BYTES = VECTOR_OUT ? 16 * ROW_BYTES : 0;
constexpr int QT_BYTES = VECTOR_QT ? WARP_N * WARP_M : 0;
constexpr int STAGING = OUT_BYTES + QT_BYTES;

// Shared memory, in order; staging lies where the ring was.
constexpr int STAGING_BYTES = THREADS / 32 * STAGING;
constexpr int SCALES_AT = RING_BYTES > STAGING_BYTES ? RING_BYTES : STAGING_BYTES;
constexpr int AMAX_AT = SCALES_AT + STAGES * PROMOTIONS * SCALES * 4;
constexpr int SHARED_BYTES = AMAX_AT + AMAXES * 4;
static_assert(SHARED_BYTES == EXPECTED_SHARED_BYTES, "legal() counts shared memory otherwise");

struct Arguments {
  const int8_t *a, *b, *a_end, *b_end;
  const float *a_scale, *b_scale;
  int64_t a_pitch, b_pitch;
  Target to;
  int k;
  float* squares;  // with SQUARES
};

DEVICE uint32_t& block_amax(int down, int across) {
  return reinterpret_cast<uint32_t*>(shared + AMAX_AT)[down * CODES_ACROSS + across];
}

// --- 2. load -----------------------------------------------------------------------------------

// Four bytes from an address that is a multiple of four, without a byte that is not the matrix's.
DEVICE uint32_t load_word(const int8_t* at, const int8_t* begin, const int8_t* end) {
  if (at >= begin && at + 4 <= end) return *reinterpret_cast<const uint32_t*>(at);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (at + i >= begin && at + i < end) word |= uint32_t(uint8_t(at[i])) << 8 * i;
  }
  return word;
}

struct Extent {
  const int8_t *begin, *end;  // of the matrix
  int k;

  DEVICE int within(int at) const {
    const int chunk = threadIdx.x % 8;
    return min(max(k - at - chunk * 16, 0), 16);
  }

  // Sixteen bytes from anywhere, zeros after the first `bytes`.
  DEVICE void copy_unaligned(uint32_t to, const int8_t* from, int bytes) const {
    const int shift = reinterpret_cast<uint64_t>(from) % 4;
    uint32_t words[5] = {}, aligned[4];
    if (bytes > 0) {
#pragma unroll
      for (int i = 0; i < 5; ++i) words[i] = load_word(from - shift + 4 * i, begin, end);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int kept = min(max(bytes - 4 * i, 0), 4);
      const uint32_t mask = kept == 4 ? ~0u : (1u << 8 * kept) - 1;
      aligned[i] = __funnelshift_r(words[i], words[i + 1], 8 * shift) & mask;
    }
    store_shared(to, aligned);
  }
};

// One scale of each slot, for as many threads as a slot has scales. Those that do not exist are
// zeros.
struct ScaleCopy {
  const float* from;
  int left;  // blocks of K from this thread's first one on
  static_assert(PROMOTIONS * SCALES <= THREADS, "at most a scale a thread");

  DEVICE ScaleCopy(const Arguments& x, const Place& tile) {
    const int blocks = ceil_div(x.k, BLOCK);
    const int p = threadIdx.x % PROMOTIONS, s = threadIdx.x / PROMOTIONS;
    const bool of_a = s < A_SCALES;
    const int row = of_a ? tile.row / BLOCK + s : tile.column / BLOCK + s - A_SCALES;
    from = (of_a ? x.a_scale : x.b_scale) + int64_t(row) * blocks + p;
    left = row < ceil_div(of_a ? x.to.m : x.to.n, BLOCK) ? blocks - p : 0;
  }

  DEVICE void copy(int slot, int block) const {
    if (threadIdx.x >= PROMOTIONS * SCALES) return;
    const int at = threadIdx.x % PROMOTIONS * SCALES + threadIdx.x / PROMOTIONS;
    copy_async<4>(shared_at(SCALES_AT + (slot * PROMOTIONS * SCALES + at) * 4), from + block,
                  block < left ? 4 : 0);
  }
};

struct Loader {
  // The addresses of more than four copies at once have no registers.
  Operand<TILE_M, Extent, 4> a;
  Operand<TILE_N, Extent, 4> b;
  ScaleCopy scales;
  int k;

  DEVICE Loader(const Arguments& x, const Place& tile)
      : a(x.a, x.a_pitch, {x.a, x.a_end, x.k}, x.to.m, tile.row),
        b(x.b, x.b_pitch, {x.b, x.b_end, x.k}, x.to.n, tile.column),
        scales(x, tile),
        k(x.k) {}

  DEVICE void copy(int slot, int step) const {
    if (step * TILE_K < k) {
      a.copy(shared_at(slot * SLOT_BYTES), step * TILE_K);
      b.copy(shared_at(slot * SLOT_BYTES + A_BYTES), step * TILE_K);
      scales.copy(slot, step * PROMOTIONS);
    }
    copy_commit();  // nothing, at the end, so that the count of groups goes on
  }
};

// --- 3. multiply, 4. promote -------------------------------------------------------------------

struct Multiplier {
  float acc[CHUNKS][SUMS];
  const Fragments fragments;
  const float *a_scale, *b_scale;  // of the first slot

  DEVICE Multiplier() {
    const Place warp = warp_place();
    const float* scales = reinterpret_cast<float*>(shared + SCALES_AT);
    a_scale = scales + warp.row / BLOCK;
    b_scale = scales + A_SCALES + warp.column / BLOCK;
#pragma unroll
    for (int r = 0; r < CHUNKS; ++r) {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) acc[r][i] = 0.0f;
    }
  }

  DEVICE void promote(int r, int j, const int (&sums)[4], float factor) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum =
          BIASED ? __fsub_rn(__int_as_float(sums[i]), BASE_FLOAT) : __int2float_rn(sums[i]);
      acc[r][4 * j + i] = __fmaf_rn(factor, sum, acc[r][4 * j + i]);
    }
  }

  // Sixteen rows by WARP_N, one BLOCK of K.
  DEVICE void chunk(int r, const uint32_t (&b)[DEPTH][WARP_N / 16][4], uint32_t from, int first,
                    const float (&factor)[FACTORS]) {
    uint32_t a[DEPTH][4];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      load_matrices(a[d], ((from + fragments.a_at) ^ (first + d) << 5) + r * 16 * TILE_K);
    }
#pragma unroll
    for (int j = 0; j < WARP_N / 8; ++j) {
      constexpr int START = BIASED ? BASE : 0;
      int sums[4] = {START, START, START, START};
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        const uint32_t(&pair)[4] = b[d][j / 2];
        mma(sums, a[d], pair[j % 2 * 2], pair[j % 2 * 2 + 1], sums);
      }
      promote(r, j, sums, factor[j * 8 / (WARP_N / FACTORS)]);
    }
  }

  // The 128 of K in a slot.
  DEVICE void slot(int index) {
    const uint32_t from = shared_at(index * SLOT_BYTES);
#pragma unroll 1  // or ptxas fetches so far ahead that it spills
    for (int p = 0; p < PROMOTIONS; ++p) {
      const int at = (index * PROMOTIONS + p) * SCALES;
      uint32_t b[DEPTH][WARP_N / 16][4];
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
#pragma unroll
        for (int j = 0; j < WARP_N / 16; ++j) {
          load_matrices(b[d][j],
                        ((from + fragments.b_at) ^ (p * DEPTH + d) << 5) + j * 16 * TILE_K);
        }
      }
      float factor[FACTORS];
#pragma unroll
      for (int r = 0; r < CHUNKS; ++r) {
        if (16 * r % BLOCK == 0) {
#pragma unroll
          for (int i = 0; i < FACTORS; ++i) {
            factor[i] = __fmul_rn(a_scale[at + 16 * r / BLOCK], b_scale[at + i]);
          }
        }
        chunk(r, b, from, p * DEPTH, factor);
      }
    }
  }
};

// --- 5. finish ---------------------------------------------------------------------------------

DEVICE uint32_t staging() { return shared_at(threadIdx.x / 32 * STAGING); }

// Staged rows of `WIDTH` bytes, ROWS of them, to a matrix of rows of `pitch` elements of BYTES.
template <int ROWS, int WIDTH, int BYTES, bool ADD>
DEVICE void send(uint32_t from, void* matrix, int row0, int column0, int rows, int columns) {
  constexpr int ROW_CHUNKS = WIDTH / 16, ELEMENTS = 16 / BYTES;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < ceil_div(ROWS * ROW_CHUNKS, 32); ++i) {
    const int index = i * 32 + threadIdx.x % 32;
    const int row = index / ROW_CHUNKS, chunk = index % ROW_CHUNKS;
    const int column = column0 + chunk * ELEMENTS;
    if (index >= ROWS * ROW_CHUNKS || row0 + row >= rows || column >= columns) continue;
    uint4 x = load_shared(from + swizzled<WIDTH>(row, chunk));
    uint4* to = reinterpret_cast<uint4*>(static_cast<uint8_t*>(matrix) +
                                         (int64_t(row0 + row) * columns + column) * BYTES);
    if (ADD) {
      const uint4 held = *to;
      auto add = [](uint32_t& a, uint32_t b) {
        a = __float_as_uint(__fadd_rn(__uint_as_float(a), __uint_as_float(b)));
      };
      add(x.x, held.x), add(x.y, held.y), add(x.z, held.z), add(x.w, held.w);
    }
    *to = x;
  }
  __syncwarp();
}

DEVICE void stage_floats(const float (&acc)[SUMS], uint32_t to) {
#pragma unroll
  for (int i = 0; i < SUMS; i += 2) {
    const int byte = column_of(i) * ELEMENT_BYTES;
    const uint32_t at = to + swizzled<ROW_BYTES>(row_of(i), byte / 16) + byte % 16;
    if constexpr (OUTPUT == FP32) store_shared(at, acc[i], acc[i + 1]);
    else store_shared(at, pack(acc[i], acc[i + 1]));
  }
}

DEVICE void finish_floats(float (&acc)[SUMS], const Target& to, int row, int column) {
  constexpr bool ADD = ACCUMULATE && OUTPUT == FP32 && VECTOR_OUT;
  if (ACCUMULATE && !ADD) add_held(acc, to, row, column);
  if constexpr (VECTOR_OUT) {
    stage_floats(acc, staging());
    send<16, ROW_BYTES, ELEMENT_BYTES, ADD>(staging(), to.c, row, column, to.m, to.n);
  } else {
    store_direct(acc, to, row, column);
  }
}

DEVICE void stage_codes(const uint16_t (&codes)[SUMS / 2], uint32_t to) {
#pragma unroll
  for (int i = 0; i < SUMS; i += 2) {
    const int column = column_of(i);
    store_shared(to + swizzled<ROW_BYTES>(row_of(i), column / 16) + column % 16, codes[i / 2]);
  }
}

// Sixteen rows of codes as columns of what the warp will send transposed.
DEVICE void stage_qt(const uint16_t (&codes)[SUMS / 2], int r, uint32_t to) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    store_shared(to + swizzled<WARP_M>(column_of(i), r) + row_of(i),
                 uint8_t(codes[i / 2] >> i % 2 * 8));
  }
}

// The codes of one chunk, with the multipliers of the blocks it lies in.
DEVICE void finish_chunk(float (&acc)[SUMS], const float (&by)[CODE_BLOCKS], uint32_t over,
                         const Target& to, int r, uint64_t seed, int row, int column) {
  uint16_t codes[SUMS / 2];
  multiply_blocks(acc, by, over);
  to_codes(acc, codes, Draw{seed, row}, column);
  if constexpr (Q && VECTOR_OUT) {
    stage_codes(codes, staging());
    send<16, ROW_BYTES, 1, false>(staging(), to.q, row, column, to.m, to.n);
  } else if constexpr (Q) {
    store_codes_direct(codes, to, row, column);
  }
  if constexpr (QT && VECTOR_QT) stage_qt(codes, r, staging() + OUT_BYTES);
  else if constexpr (QT) store_qt_direct(codes, to, row, column);
}

DEVICE void finish_codes(float (&acc)[CHUNKS][SUMS], const Target& to, const Place& tile) {
  const Place warp = warp_place();
  const int row0 = tile.row + warp.row, column0 = tile.column + warp.column;
  const int across = warp.column / OUT_BLOCK;
#pragma unroll
  for (int r = 0; r < CHUNKS; ++r) {
    uint32_t amax[CODE_BLOCKS];
    warp_amax(acc[r], amax, to, row0 + 16 * r, column0);
#pragma unroll
    for (int b = 0; b < CODE_BLOCKS; ++b) {
      if (threadIdx.x % 32 == 0) {
        atomicMax(&block_amax((warp.row + 16 * r) / OUT_BLOCK, across + b), amax[b]);
      }
    }
  }
  __syncthreads();
  const uint64_t seed = STOCHASTIC ? *to.seed : 0;
  float by[CODE_BLOCKS];
  uint32_t over = 0;
#pragma unroll
  for (int r = 0; r < CHUNKS; ++r) {
    const int row = row0 + 16 * r;
    if (16 * r % OUT_BLOCK == 0) {
      over = 0;
#pragma unroll
      for (int b = 0; b < CODE_BLOCKS; ++b) {
        const uint32_t amax = block_amax((warp.row + 16 * r) / OUT_BLOCK, across + b);
        float scale;
        block_scale(amax, scale, by[b]);
        over |= uint32_t(exceeds(amax, by[b])) << b;
        if (threadIdx.x % 32 == 0 && row % OUT_BLOCK == 0 &&
            (column0 + b * OUT_BLOCK) % OUT_BLOCK == 0) {
          store_scale(scale, to, row, column0 + b * OUT_BLOCK);
        }
      }
    }
    finish_chunk(acc[r], by, over, to, r, seed, row, column0);
  }
  if constexpr (QT && VECTOR_QT) {
    send<WARP_N, WARP_M, 1, false>(staging() + OUT_BYTES, to.qt, column0, row0, to.n, to.m);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gemm(const __grid_constant__ Arguments x) {
  if (int(threadIdx.x) < AMAXES) block_amax(0, threadIdx.x) = 0;
  Multiplier multiplier;
  const Loader loader(x, tile_place(x.to));
  const int steps = ceil_div(x.k, TILE_K);
  Ring ring;
  ring.start(loader);
  ring.run(multiplier, loader, steps);
  ring.finish();
  const Place tile = tile_place(x.to), warp = warp_place();
#pragma unroll
  for (int r = 0; r < CHUNKS; ++r) add_bias(multiplier.acc[r], x.to, tile.column + warp.column);
  if constexpr (OUTPUT == INT8) {
    finish_codes(multiplier.acc, x.to, tile);
  } else {
#pragma unroll
    for (int r = 0; r < CHUNKS; ++r) {
      const int row = tile.row + warp.row + 16 * r, column = tile.column + warp.column;
      if (SQUARES) store_squares(multiplier.acc[r], x.squares, x.to, row, column);
      finish_floats(multiplier.acc[r], x.to, row, column);
    }
  }
}
