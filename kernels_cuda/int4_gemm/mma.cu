// INT4 GEMM for sm_80 and later: C (m×n) = A (m×k) · Bᵀ (n×k), one scale a matrix.
//
// A block of WARPS_M×WARPS_N warps makes one tile of TILE_M×TILE_N. In order:
//
//   1. place:    which tile this is; its code and the ring's are in mma_tiles.cuh. RASTER rows of
//                tiles are walked column by column, so that L2 holds what neighbours share. Of
//                a dgrad, tiles beyond the rows there are end here.
//   2. load:     all threads keep a ring of STAGES slots full, each 128 bytes of K deep, by cp.async
//                in 16 bytes, or as few as their alignment allows, zeros beyond the edges. Rows of
//                128 bytes have their 16-byte chunks permuted by the row's number, so that neither
//                copies nor ldmatrix meet a bank twice.
//   3. multiply: each warp keeps WARP_M×WARP_N int32 sums over all of K. Between a wgrad's high and
//                low parts they are multiplied by 14.
//   4. finish:   scale, weight and bias as the reference rounds them, INT8 codes if they are asked
//                for, and through the ring's memory to rows of 16 bytes.
//
// Nibbles and bytes are the same code: a product of m16n8k64 on s4 and one of m16n8k32 on s8 both
// take 32 bytes of K, from the same bytes of the same lanes (PTX ISA, "Matrix fragments for
// mma.m16n8k64" and "mma.m16n8k32"), in the same time on sm_80, sm_86 and sm_89.
#define CHUNK_WARPS 1
#include "epilogue.cuh"
#include "mma_tiles.cuh"

constexpr int PRODUCT_BYTES = 32;   // of K, in one product
constexpr int DEPTH = TILE_BYTES / PRODUCT_BYTES;
constexpr int PAIRS = WARP_N / 16;  // of eight columns

// What a warp sends through shared memory at the end, where the ring was: sixteen rows.
constexpr int ROW_BYTES = WARP_N * ELEMENT_BYTES;
constexpr int STAGING = 16 * ROW_BYTES;
constexpr int STAGING_BYTES = THREADS / 32 * STAGING;

// Blocks of codes that a tile holds down and across, and sixteen rows of a warp across. The largest
// |x| of each lies after the ring.
constexpr int CODES_DOWN = TILE_M > OUT_BLOCK ? TILE_M / OUT_BLOCK : 1;
constexpr int CODES_ACROSS = TILE_N > OUT_BLOCK ? TILE_N / OUT_BLOCK : 1;
constexpr int CODE_BLOCKS = WARP_N > OUT_BLOCK ? WARP_N / OUT_BLOCK : 1;
constexpr int AMAXES = OUTPUT == INT8 ? CODES_DOWN * CODES_ACROSS : 0;
static_assert(AMAXES <= THREADS, "a thread sets each to zero");
constexpr int AMAX_AT = RING_BYTES > STAGING_BYTES ? RING_BYTES : STAGING_BYTES;
constexpr int SHARED_BYTES = AMAX_AT + 4 * AMAXES;
static_assert(SHARED_BYTES == EXPECTED_SHARED_BYTES, "legal() counts shared memory otherwise");

struct Arguments {
  const int8_t *a, *b;
  int64_t a_pitch, b_pitch;  // bytes from row to row
  Epilogue to;
  int row_bytes;  // of A and B
  float* scale;   // of codes
};

// --- 2. load -----------------------------------------------------------------------------------

struct Extent {
  int bytes;  // of K, from this thread's first on

  DEVICE explicit Extent(int bytes) : bytes(bytes - threadIdx.x % 8 * 16) {}

  DEVICE int within(int at) const { return min(max(bytes - at, 0), 16); }

  // The first `bytes` of sixteen, then zeros; a byte at a time, since they may lie anywhere.
  DEVICE void copy_unaligned(uint32_t to, const int8_t* from, int bytes) const {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i < bytes) words[i / 4] |= uint32_t(uint8_t(from[i])) << i % 4 * 8;
    }
    store_shared(to, words);
  }
};

struct Loader {
  Operand<TILE_M, Extent> a;
  Operand<TILE_N, Extent> b;
  int steps;

  DEVICE Loader(const Arguments& x, const Place& tile, int rows, int bytes)
      : a(x.a, x.a_pitch, Extent(bytes), rows, tile.row),
        b(x.b, x.b_pitch, Extent(bytes), x.to.n, tile.column),
        steps(ceil_div(bytes, TILE_BYTES)) {}

  DEVICE void copy(int slot, int step) const {
    if (step < steps) {
      a.copy(shared_at(slot * SLOT_BYTES), step * TILE_BYTES);
      b.copy(shared_at(slot * SLOT_BYTES + A_BYTES), step * TILE_BYTES);
    }
    copy_commit();  // nothing, at the end, so that the count of groups goes on
  }
};

// --- 3. multiply -------------------------------------------------------------------------------

// c += A (16×64) · Bᵀ (8×64), of nibbles
DEVICE void mma_nibbles(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

struct Multiplier {
  int sums[CHUNKS][2 * PAIRS][4] = {};
  const Fragments fragments;

  DEVICE void slot(int index) {
    const uint32_t from = shared_at(index * SLOT_BYTES);
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      uint32_t a[CHUNKS][4], b[PAIRS][4];
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        load_matrices(b[j], ((from + fragments.b_at) ^ d << 5) + j * 16 * TILE_BYTES);
      }
#pragma unroll
      for (int r = 0; r < CHUNKS; ++r) {
        load_matrices(a[r], ((from + fragments.a_at) ^ d << 5) + r * 16 * TILE_BYTES);
      }
#pragma unroll
      for (int r = 0; r < CHUNKS; ++r) {
#pragma unroll
        for (int j = 0; j < 2 * PAIRS; ++j) {
          const uint32_t(&pair)[4] = b[j / 2];
          const uint32_t b0 = pair[j % 2 * 2], b1 = pair[j % 2 * 2 + 1];
          if constexpr (NIBBLES) mma_nibbles(sums[r][j], a[r], b0, b1);
          else mma(sums[r][j], a[r], b0, b1, sums[r][j]);
        }
      }
    }
  }

  DEVICE void weigh() {
#pragma unroll
    for (int r = 0; r < CHUNKS; ++r) {
#pragma unroll
      for (int j = 0; j < 2 * PAIRS; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[r][j][i] *= HIGH;
      }
    }
  }
};

// `high`: the steps after which what is summed is weighed; of a wgrad alone.
DEVICE void multiply(Multiplier& multiplier, const Loader& loader, int high) {
  constexpr int PARTS = PRODUCT == WGRAD ? 2 : 1;
  Ring ring;
  ring.start(loader);
#pragma unroll 1
  for (int part = 0; part < PARTS; ++part) {
    ring.run(multiplier, loader, part == PARTS - 1 ? loader.steps : high);
    if (part < PARTS - 1) multiplier.weigh();
  }
  ring.finish();
}

// --- 4. finish ---------------------------------------------------------------------------------

DEVICE void stage(const float (&x)[SUMS], uint32_t to) {
#pragma unroll
  for (int i = 0; i < SUMS; i += 2) {
    const int byte = column_of(i) * ELEMENT_BYTES;
    const uint32_t at = to + swizzled<ROW_BYTES>(row_of(i), byte / 16) + byte % 16;
    if constexpr (OUTPUT == FP32) store_shared(at, x[i], x[i + 1]);
    else store_shared(at, pack(x[i], x[i + 1]));
  }
}

// One element, or sixteen bytes of them, from shared memory to C.
DEVICE void send_part(uint32_t from, void* c, int64_t at) {
  if constexpr (VECTOR_OUT) {
    *reinterpret_cast<uint4*>(static_cast<uint8_t*>(c) + at * ELEMENT_BYTES) = load_shared(from);
  } else if constexpr (OUTPUT == FP32) {
    static_cast<float*>(c)[at] = load_shared_float(from);
  } else {
    static_cast<uint16_t*>(c)[at] = load_shared_u16(from);
  }
}

// Sixteen staged rows to C, in as many bytes as their alignment allows.
DEVICE void send(uint32_t from, const Epilogue& to, int rows, int row0, int column0) {
  constexpr int ELEMENTS = VECTOR_OUT ? 16 / ELEMENT_BYTES : 1, ROW_PARTS = WARP_N / ELEMENTS;
  __syncwarp();
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < 16 * ROW_PARTS; i += 32) {
    const int row = i / ROW_PARTS, column = i % ROW_PARTS * ELEMENTS;
    if (row0 + row >= rows || column0 + column >= to.n) continue;
    const int byte = column * ELEMENT_BYTES;
    send_part(from + swizzled<ROW_BYTES>(row, byte / 16) + byte % 16, to.c,
              int64_t(row0 + row) * to.n + column0 + column);
  }
  __syncwarp();
}

DEVICE void finish(const int (&sums)[2 * PAIRS][4], const Epilogue& to, int rows, int row0,
                   int column0) {
  const float scale = scale_of(to);
  const float weight[2] = {weight_of(to, row0 + row_of(0)), weight_of(to, row0 + row_of(2))};
  float x[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    x[i] = finished(sums[i / 4][i % 4], to, scale, weight[i / 2 % 2], column0 + column_of(i));
  }
  const uint32_t staging = shared_at(threadIdx.x / 32 * STAGING);
  stage(x, staging);
  send(staging, to, rows, row0, column0);
}

DEVICE uint32_t& block_amax(int down, int across) {
  return reinterpret_cast<uint32_t*>(shared + AMAX_AT)[down * CODES_ACROSS + across];
}

// Sixteen rows' sums as they are stored, and their share in the largest |x| of blocks.
DEVICE void take_sums(float (&x)[SUMS], const int (&sums)[2 * PAIRS][4], const Target& to,
                      float scale, const Place& tile, const Place& within) {
  const int column = tile.column + within.column;
#pragma unroll
  for (int i = 0; i < SUMS; ++i) x[i] = scaled(sums[i / 4][i % 4], scale);
  add_bias(x, to, column);
  uint32_t amax[CODE_BLOCKS];
  warp_amax(x, amax, to, tile.row + within.row, column);
  if (threadIdx.x % 32 != 0) return;
#pragma unroll
  for (int b = 0; b < CODE_BLOCKS; ++b) {
    atomicMax(&block_amax(within.row / OUT_BLOCK, within.column / OUT_BLOCK + b), amax[b]);
  }
}

// Multipliers of the blocks across sixteen rows. The warp of its first element writes a scale.
DEVICE void scale_blocks(float (&by)[CODE_BLOCKS], const Target& to, const Place& tile,
                         const Place& within) {
#pragma unroll
  for (int b = 0; b < CODE_BLOCKS; ++b) {
    const int row = within.row, column = within.column + b * OUT_BLOCK;
    float scale;
    block_scale(block_amax(row / OUT_BLOCK, column / OUT_BLOCK), scale, by[b]);
    if (threadIdx.x % 32 == 0 && row % OUT_BLOCK == 0 && column % OUT_BLOCK == 0) {
      store_scale(scale, to, tile.row + row, tile.column + column);
    }
  }
}

DEVICE void send_codes(const uint16_t (&codes)[SUMS / 2], const Epilogue& to, const Target& target,
                       int row, int column) {
  if constexpr (VECTOR_OUT) {
    const uint32_t staging = shared_at(threadIdx.x / 32 * STAGING);
#pragma unroll
    for (int i = 0; i < SUMS; i += 2) {
      const int byte = column_of(i);
      const uint32_t at = staging + swizzled<ROW_BYTES>(row_of(i), byte / 16) + byte % 16;
      store_shared(at, codes[i / 2]);
    }
    send(staging, to, to.m, row, column);
  } else {
    store_codes_direct(codes, target, row, column);
  }
}

DEVICE void finish_codes(const int (&sums)[CHUNKS][2 * PAIRS][4], const Arguments& x,
                         const Place& tile, const Place& warp) {
  const Target to = target_of(x.to, x.scale);
  const float scale = scale_of(x.to);
  float acc[CHUNKS][SUMS];
#pragma unroll
  for (int r = 0; r < CHUNKS; ++r) {
    take_sums(acc[r], sums[r], to, scale, tile, {warp.row + 16 * r, warp.column});
  }
  __syncthreads();
  float by[CODE_BLOCKS];
#pragma unroll
  for (int r = 0; r < CHUNKS; ++r) {
    const Place within{warp.row + 16 * r, warp.column};
    if (16 * r % OUT_BLOCK == 0) scale_blocks(by, to, tile, within);
    multiply_blocks(acc[r], by, 0);
    uint16_t codes[SUMS / 2];
    to_codes(acc[r], codes, Draw{}, 0);  // rounded to nearest, which draws nothing
    send_codes(codes, x.to, to, tile.row + within.row, tile.column + within.column);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    int4_gemm(const __grid_constant__ Arguments x) {
  const int rows = rows_of(x.to);
  if (tile_place(x.to).row >= rows) return;
  if (AMAXES > 0 && int(threadIdx.x) < AMAXES) block_amax(0, threadIdx.x) = 0;
  const int high = PRODUCT == WGRAD ? x.to.counts[0] / TILE_BYTES : 0;
  const int bytes = PRODUCT == WGRAD ? min(x.to.counts[1], x.row_bytes) : x.row_bytes;
  Multiplier multiplier;
  multiply(multiplier, Loader(x, tile_place(x.to), rows, bytes), high);
  const Place tile = tile_place(x.to), warp = warp_place();
  if constexpr (OUTPUT == INT8) {
    finish_codes(multiplier.sums, x, tile, warp);
  } else {
#pragma unroll
    for (int r = 0; r < CHUNKS; ++r) {
      finish(multiplier.sums[r], x.to, rows, tile.row + warp.row + 16 * r,
             tile.column + warp.column);
    }
  }
}
