// Per-block INT8 GEMM with fallback for sm_90a: (A + R)·Bᵀ, a scale for each BLOCK×BLOCK tile of each.
// R is a second plane of codes, which counts in those of A's blocks alone whose scale in it is not 0.
//
// What it shares with other kernels by blocks, first of all how they work, is in block_gemm.cuh. Here
// are a tile's steps along K: all blocks of the first plane, then those of the second that fall back
// in any of the rows that the tile has of the operand with planes. `load` and `scale` each find them
// in the second plane's scales; the multipliers take what comes, up to the slot that is marked.
//
// Here A is the operand of a tile's rows and B that of its columns. Either may have the planes
// (PLANES_OF_B), and a tile is written as it is or transposed (TURNED): a tile that is taller than wide
// costs only what falls back if its columns have the planes.
#define MARKED 1
#include "block_gemm.cuh"
#include "ptx_transposed.cuh"

static_assert(BLOCK == TILE_K, "a step is one block");
static_assert((PLANES_OF_B ? CLUSTER_N : CLUSTER_M) == 1, "a cluster's blocks take the same steps");

struct Arguments {
  TensorMap a, b, second, out;
  const float *a_scale, *b_scale, *second_scale;
  Target to;
  int k;
};

// The tiles of a block (or its cluster), in turn.
struct Parts {
  int down, across, tile;
  DEVICE explicit Parts(const Arguments& x)
      : down(ceil_div(x.to.m, TILE_M * CLUSTER_M)),
        across(ceil_div(x.to.n, TILE_N * CLUSTER_N)),
        tile(blockIdx.x / CLUSTER) {}
  DEVICE bool more() const { return tile < down * across; }
  DEVICE void next() { tile += gridDim.x / CLUSTER; }
  DEVICE Tile part(uint32_t rank) const { return tile_at(tile, down, across, rank); }
};

// --- steps ---------------------------------------------------------------------------------------

// A block of K, of one of the planes; negative for none.
struct Step {
  int block = 0;
  bool second = false;
  DEVICE bool exists() const { return block >= 0; }
};

// Rows of a tile of the operand with planes, and the most blocks that these lie in.
constexpr int PLANE_ROWS = PLANES_OF_B ? TILE_N : TILE_M;
constexpr int BANDS = PLANE_ROWS % BLOCK == 0
                          ? PLANE_ROWS / BLOCK
                          : ceil_div(BLOCK - (PLANE_ROWS & -PLANE_ROWS) + PLANE_ROWS, BLOCK);

// Finds a tile's steps, one after the other, all lanes of a warp together. At each of the first steps
// it looks which 32 blocks of K fall back, whose scales were asked for a step before, so that nobody
// waits for memory. Lane i keeps what it saw of blocks 32·i to 32·i + 31.
struct Walk {
  const float* bands[BANDS];  // null beyond the edge
  int blocks;
  float ahead[BANDS];
  uint32_t falls = 0;

  DEVICE Walk(const Arguments& x, const Tile& tile) : blocks(ceil_div(x.k, BLOCK)) {
    const int row = PLANES_OF_B ? tile.column : tile.row;
    const int end = min(row + PLANE_ROWS, PLANES_OF_B ? x.to.n : x.to.m);
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
      const int band = row / BLOCK + i;
      bands[i] = band * BLOCK < end ? x.second_scale + int64_t(band) * blocks : nullptr;
    }
    ask(0);
  }

  DEVICE void ask(int word) {
    const int block = 32 * word + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < BANDS; ++i) ahead[i] = bands[i] && block < blocks ? bands[i][block] : 0.0f;
  }

  DEVICE void look(int word) {
    bool any = false;
#pragma unroll
    for (int i = 0; i < BANDS; ++i) any |= ahead[i] != 0.0f;
    const uint32_t found = __ballot_sync(0xFFFFFFFFu, any);
    if (threadIdx.x % 32 == word) falls = found;
    ask(word + 1);
  }

  // The first step of the second plane that is not before a block.
  DEVICE Step second_from(int block) const {
    const int gone = block - 32 * int(threadIdx.x % 32);
    const uint32_t left = gone <= 0 ? falls : gone < 32 ? falls >> gone << gone : 0;
    const uint32_t lanes = __ballot_sync(0xFFFFFFFFu, left != 0);
    if (lanes == 0) return {-1, true};
    const int lane = __ffs(lanes) - 1;
    return {32 * lane + __ffs(__shfl_sync(0xFFFFFFFFu, left, lane)) - 1, true};
  }

  // What follows a step; to be asked of each in turn.
  DEVICE Step after(Step here) {
    if (here.second) return second_from(here.block + 1);
    if (32 * here.block < blocks) look(here.block);
    return here.block + 1 < blocks ? Step{here.block + 1, false} : second_from(0);
  }
};

// --- roles ---------------------------------------------------------------------------------------

// 1. One warp keeps the ring full, of which one thread does the fetching.
DEVICE void load(const Arguments& x) {
  const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
  constexpr uint16_t ALL = (1 << CLUSTER) - 1;
  const Share share{rank % CLUSTER_M, rank / CLUSTER_M, ALL, ALL};
  Slot slot;
  for (Parts parts(x); parts.more(); parts.next()) {
    const Tile tile = parts.part(rank);
    const int a_row = tile.row + share.rank_n * A_SHARE;
    const int b_row = tile.column + share.rank_m * B_SHARE;
    Walk walk(x, tile);
    for (Step step; step.exists(); step = walk.after(step), slot.next()) {
      if (threadIdx.x % 32 != 0) continue;
      const TensorMap& a = step.second && !PLANES_OF_B ? x.second : x.a;
      const TensorMap& b = step.second && PLANES_OF_B ? x.second : x.b;
      fetch(slot, share, a, b, a_row, b_row, step.block * TILE_K);
    }
  }
}

// How far behind the first plane's scales the second's are, which lie alike.
DEVICE int64_t planes_apart(const Arguments& x) {
  return x.second_scale - (PLANES_OF_B ? x.b_scale : x.a_scale);
}

// The larger of both planes', for `find_largest`.
DEVICE uint32_t scale_bits(const Arguments& x, const float* scales, int block, bool of_a) {
  const uint32_t bits = __float_as_uint(scales[block]);
  return of_a == PLANES_OF_B ? bits : max(bits, __float_as_uint(scales[block + planes_apart(x)]));
}

DEVICE float product(const Arguments& x, const Pair& pair, const Step& step) {
  if (!step.exists() || !pair.a || !pair.b) return 0.0f;
  const int64_t block = step.block, within = step.second ? block + planes_apart(x) : block;
  return __fmul_rn(pair.a[PLANES_OF_B ? block : within], pair.b[PLANES_OF_B ? within : block]);
}

// 2. One warp's share of the factors, as for the plain product.
DEVICE void scale(const Arguments& x, int warp) {
  const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int lane = threadIdx.x % 32;
  Slot slot;
  int whose = 0, parity = 0;
  for (Parts parts(x); parts.more(); parts.next(), parity ^= 1) {
    const Tile tile = parts.part(rank);
    Walk walk(x, tile);
    uint32_t* largest =
        reinterpret_cast<uint32_t*>(shared + LARGEST_AT) + parity * (FACTOR_ROWS + FACTORS);
    if (BIAS && warp == 0) prefetch_bias(x.to, tile);
    if (TELESCOPED) find_largest(largest, x, tile, warp);
    Pair pairs[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) pairs[i].start(x, tile, i * 32 + lane, largest);
    int count = 0;
    Step first, other;  // of the windows since a correction
    for (Step step, after; step.exists(); step = after, slot.next()) {
      after = walk.after(step);
      if (count % CORRECTED == 0) first = step;
      if (count % CORRECTED == WINDOW) other = step;
      const bool mine = whose == warp, window_end = ++count % WINDOW == 0;
      whose = whose == SCALE_WARPS - 1 ? 0 : whose + 1;
      if (!mine) continue;
      float f[PAIRS][1 + TELESCOPED];
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        f[i][0] = pairs[i].on_grid(product(x, pairs[i], step));
        if constexpr (TELESCOPED) {
          f[i][1] = pairs[i].on_grid(window_end ? 0.0f : product(x, pairs[i], after));
          float firsts = 0.0f;
          if (count % CORRECTED == 0 || !after.exists()) {
            firsts = pairs[i].on_grid(product(x, pairs[i], first)) - Pair::GRID;
            if ((count - 1) % CORRECTED >= WINDOW) {
              firsts += pairs[i].on_grid(product(x, pairs[i], other)) - Pair::GRID;
            }
          }
          Pair::differ(f[i], firsts);
        }
      }
      barrier_wait(slot.empty(), slot.parity ^ 1);
      give_factors(slot, pairs, f, !after.exists());
    }
  }
}

// --- the end of a tile ---------------------------------------------------------------------------

constexpr int TURNED_ROWS = 128 / ELEMENT_BYTES;  // of a tile, that a panel of its transpose has

// A panel of the transpose: of 64 columns, and of 64 rows or half of them.
DEVICE void stage_turned(const float (&acc)[SUMS], int panel, int half, uint32_t buffer) {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // or ptxas does the arithmetic below at each step of the tile
  const int warp = thread / 32 % 4, lane = thread % 32;
  if constexpr (OUTPUT == FP32) {
    if (warp / 2 != half) return;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const int byte = 4 * (warp % 2 * 16 + lane / 4 + i / 2 % 2 * 8);
      store_shared(swizzled<128>(buffer, row, byte), acc[32 * panel + i]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const int i = 4 * (8 * panel + j);
      const int row = 8 * (j + lane / 16) + lane % 8, byte = 32 * warp + lane / 8 % 2 * 16;
      store_transposed(swizzled<128>(buffer, row, byte), pack(acc[i], acc[i + 1]),
                       pack(acc[i + 2], acc[i + 3]), pack(acc[i + 4], acc[i + 5]),
                       pack(acc[i + 6], acc[i + 7]));
    }
  }
}

// From registers: for rows whose pitch the copy engine does not take.
DEVICE void store_turned(const float (&acc)[SUMS], const Target& to, int row0, int column0) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    const int row = row0 + row_of(i), column = column0 + column_of(i);
    if (row >= to.m || column >= to.n) continue;
    const int64_t at = int64_t(column) * to.m + row;
    if constexpr (OUTPUT == FP32) static_cast<float*>(to.c)[at] = acc[i];
    else static_cast<uint16_t*>(to.c)[at] = uint16_t(pack(acc[i], 0.0f));
  }
}

DEVICE void finish_turned(const float (&acc)[SUMS], const Arguments& x, Staging& staging, int row,
                          int column) {
  if constexpr (TMA_OUT) {
#pragma unroll
    for (int panel = 0; panel < TILE_N / 64; ++panel) {
#pragma unroll
      for (int half = 0; half < 64 / TURNED_ROWS; ++half) {
        stage_turned(acc, panel, half, staging.take());
        staging.give(x.out, row + half * TURNED_ROWS, column + 64 * panel);
      }
    }
  } else {
    store_turned(acc, x.to, row, column);
  }
}

DEVICE void add_row_bias(float (&acc)[SUMS], const Target& to, int row0) {
  float bias[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + lane_row() + 8 * half;
    bias[half] = row < to.m ? to.bias[row] : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < SUMS; ++i) acc[i] = __fadd_rn(acc[i], bias[i / 2 % 2]);
}

DEVICE void consume(const Arguments& x, int group) {
  const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
  Multiplier multiplier(group, rank);
  Staging staging(group);
  for (Parts parts(x); parts.more(); parts.next()) {
    const Tile tile = parts.part(rank);
    multiplier.tile();
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float(&acc)[SUMS] = multiplier.acc[r];
      const int row = tile.row + 64 * (group * ROWS + r);
      if (ROW_BIAS) add_row_bias(acc, x.to, row);
      add_bias(acc, x.to, tile.column);
      if constexpr (TURNED) finish_turned(acc, x, staging, row, tile.column);
      else finish_floats(acc, x, staging, row, tile.column);
    }
  }
  multiplier.turns.end(group);
  if (staging.leader) tma_wait_read<0>();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(128 * (GROUPS + 1), 1)
    fallback_gemm(const __grid_constant__ Arguments x) {
  // The same in all lanes, and shown to be, so that it lives in a uniform register.
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  const int warp = threadIdx.x / 32 % 4;
  if (threadIdx.x == 0) start();
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();
  if (group == GROUPS) {
    give_registers<PRODUCER_REGISTERS>();
    if (warp == 0) load(x);
    else scale(x, warp - 1);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(x, group);
  }
  // A block's shared memory must outlast what its neighbours still send and signal.
  if (CLUSTER > 1) cluster_sync();
}
