// Per-block INT8 GEMM for sm_90a: C (m×n) = A (m×k) · Bᵀ (n×k), a scale for each BLOCK×BLOCK tile.
//
// One persistent block an SM walks over tiles of TILE_M×TILE_N. Its warps have three roles, which
// meet at the full and empty barriers of a ring of STAGES slots, each 128 of K deep:
//
//   1. load:     one thread fetches A and B by TMA, each block of a cluster its share of what the
//                cluster has in common, for all of it.
//   2. scale:    one to three warps multiply the scales of A's and B's blocks, so that the
//                multipliers' inner loop reads its factors ready-made.
//   3. multiply: GROUPS warp groups each keep CHUNKS chunks of 64×TILE_N. Per BLOCK of K: int32
//                sums on the tensor cores, then promoted into fp32. While one group promotes,
//                another multiplies.
//   4. finish:   each group writes its own rows by TMA, from a staging buffer, and goes on with
//                the next tile while the copy engine works; no group waits for another.
//
// Schedules. Exact: acc += (sA·sB)·float(S) with the sums S from zero, one rounding a block, as
// the reference rounds. Telescoped: the sums start at the bits of 12582912.0f and run on over a
// window of 256 of K, where they cannot leave that float's binade; read as a float they are
// 12582912 + S. By summation by parts Σ s_b·(S_b − S_{b−1}) = Σ (s_b − s_{b+1})·S_b with
// s_{n+1} = 0, so that a block costs one FMA; Σ (s_b − s_{b+1})·12582912 is taken off once a window.
#include "epilogue.cuh"

constexpr int TILE_M = 64 * ROWS * GROUPS;
constexpr int TILE_K = 128;
constexpr int PROMOTIONS = TILE_K / BLOCK;
constexpr int SUMS = TILE_N / 2;        // a thread's, of 64 rows
constexpr int ITEMS = PROMOTIONS * ROWS;  // products of a slot, each promoted once
constexpr int ACCUMULATORS = TELESCOPED ? ROWS : 1;  // telescoped sums run on from block to block
constexpr int WINDOW = 256 / TILE_K;    // slots between two resets of telescoped sums
constexpr int CORRECTED = 4 * WINDOW;   // and between two corrections
constexpr int BASE = 0x4B400000;  // the bits of
constexpr float BASE_FLOAT = 12582912.0f;

constexpr int CLUSTER = CLUSTER_M * CLUSTER_N;
constexpr int A_BYTES = TILE_M * TILE_K, B_BYTES = TILE_N * TILE_K;

// Rows and columns of a tile that have one scale wherever the tile lies.
constexpr int SCALE_ROWS = BLOCK < 64 ? BLOCK : 64;
constexpr int SCALE_COLUMNS = BLOCK >= 128 && TILE_N % 128 == 0 ? 128
                              : BLOCK >= 64 && TILE_N % 64 == 0 ? 64 : 32;
constexpr int FACTOR_ROWS = TILE_M / SCALE_ROWS, FACTORS = TILE_N / SCALE_COLUMNS;
constexpr int FACTOR_PITCH = FACTORS > 2 ? ceil_div(FACTORS, 4) * 4 : FACTORS;
// Of a slot: a table for each promotion, and one of what the base adds to telescoped sums.
constexpr int FACTOR_TABLE = FACTOR_ROWS * FACTOR_PITCH;
constexpr int FACTOR_FLOATS = (PROMOTIONS + TELESCOPED) * FACTOR_TABLE;
constexpr int SCALE_WARPS = 3;

// A panel is what one TMA store writes of a chunk: 64 rows of as wide a swizzle as divides them.
constexpr int ROW_BYTES = TILE_N * ELEMENT_BYTES;
constexpr int PANEL_BYTES = ROW_BYTES % 128 == 0 ? 128 : ROW_BYTES % 64 == 0 ? 64 : 32;
constexpr int PANELS = ROW_BYTES / PANEL_BYTES;
constexpr int PANEL_COLUMNS = PANEL_BYTES / ELEMENT_BYTES, PANEL_GROUPS = PANEL_COLUMNS / 8;
constexpr int STAGING = TURNED && TILE_N > 128 ? 64 * TILE_N : 8192;

constexpr int AMAX_BLOCKS = TILE_N / BLOCK > 0 ? TILE_N / BLOCK : 1;
constexpr int AMAX_WORDS = OUTPUT == INT8 ? 2 * GROUPS * ROWS * 4 * AMAX_BLOCKS : 0;

// Shared memory, in order.
constexpr int A_AT = 0;
constexpr int B_AT = A_AT + STAGES * A_BYTES;
constexpr int STAGING_AT = B_AT + STAGES * B_BYTES;
constexpr int FACTORS_AT = STAGING_AT + GROUPS * BUFFERS * STAGING;
constexpr int AMAX_AT = FACTORS_AT + ceil_div(STAGES * FACTOR_FLOATS, 4) * 16;
constexpr int BARRIERS_AT = AMAX_AT + ceil_div(AMAX_WORDS, 2) * 8;
constexpr int SHARED_BYTES = BARRIERS_AT + 16 * STAGES;
static_assert(SHARED_BYTES == EXPECTED_SHARED_BYTES, "legal() counts shared memory otherwise");

struct Arguments {
  TensorMap a, b, out, turned;
  const float *a_scale, *b_scale;
  Target to;
  int k;
};

// The place in the ring, and how often it has gone round.
struct Slot {
  int index = 0;
  uint32_t parity = 0;
  DEVICE void next() {
    if (++index == STAGES) index = 0, parity ^= 1;
  }
};

struct Tile {
  int row, column;
};

// The tiles of a block in turn: RASTER rows of (cluster) tiles are walked column by column, so that
// L2 holds what neighbours share.
struct Tiles {
  int down, across, index;
  DEVICE Tiles(const Target& to)
      : down(ceil_div(to.m, TILE_M * CLUSTER_M)),
        across(ceil_div(to.n, TILE_N * CLUSTER_N)),
        index(blockIdx.x / CLUSTER) {}
  DEVICE bool more() const { return index < down * across; }
  DEVICE void next() { index += gridDim.x / CLUSTER; }
  DEVICE Tile tile(uint32_t rank) const {
    const int first = index / (RASTER * across) * RASTER;
    const int rows = min(down - first, RASTER);
    const int within = index % (RASTER * across);
    const int row = (first + within % rows) * CLUSTER_M + int(rank) % CLUSTER_M;
    const int column = within / rows * CLUSTER_N + int(rank) / CLUSTER_M;
    return {row * TILE_M, column * TILE_N};
  }
};

extern __shared__ __align__(1024) uint8_t shared[];

DEVICE uint32_t shared_at(int offset) { return shared_address(shared) + offset; }
DEVICE uint32_t full(const Slot& slot) { return shared_at(BARRIERS_AT + 16 * slot.index); }
DEVICE uint32_t empty(const Slot& slot) { return shared_at(BARRIERS_AT + 16 * slot.index + 8); }
DEVICE float* factors(const Slot& slot) {
  return reinterpret_cast<float*>(shared + FACTORS_AT) + slot.index * FACTOR_FLOATS;
}

// Blocks of the cluster that have rows of A, or columns of B, in common.
DEVICE constexpr bool common(uint32_t a, uint32_t b) {
  return a % CLUSTER_M == b % CLUSTER_M || a / CLUSTER_M == b / CLUSTER_M;
}

// 1. One thread keeps the ring full of A and B.
DEVICE void load(const Arguments& x) {
  const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
  const uint32_t rank_m = rank % CLUSTER_M, rank_n = rank / CLUSTER_M;
  constexpr int A_SHARE = TILE_M / CLUSTER_N, B_SHARE = TILE_N / CLUSTER_M;
  uint16_t a_mask = 0, b_mask = 0;
  for (int i = 0; i < CLUSTER_N; ++i) a_mask |= 1 << (rank_m + CLUSTER_M * i);
  for (int i = 0; i < CLUSTER_M; ++i) b_mask |= 1 << (i + CLUSTER_M * rank_n);
  Slot slot;
  for (Tiles tiles(x.to); tiles.more(); tiles.next()) {
    const Tile tile = tiles.tile(rank);
    const int a_row = tile.row + rank_n * A_SHARE, b_row = tile.column + rank_m * B_SHARE;
    for (int k = 0; k < x.k; k += TILE_K, slot.next()) {
      barrier_wait(empty(slot), slot.parity ^ 1);
      barrier_expect(full(slot), A_BYTES + B_BYTES);
      const uint32_t a = shared_at(A_AT) + slot.index * A_BYTES + rank_n * A_SHARE * TILE_K;
      const uint32_t b = shared_at(B_AT) + slot.index * B_BYTES + rank_m * B_SHARE * TILE_K;
      if (CLUSTER_N > 1) tma_load_multicast(a, x.a, k, a_row, full(slot), a_mask);
      else tma_load(a, x.a, k, a_row, full(slot));
      if (CLUSTER_M > 1) tma_load_multicast(b, x.b, k, b_row, full(slot), b_mask);
      else tma_load(b, x.b, k, b_row, full(slot));
    }
  }
}

// 2. The factors of one slot, which begins with `block`: for each promotion and pair of A's and B's
// blocks the product of their scales, or its difference from the next one's.
DEVICE void scale(const Arguments& x, const Tile& tile, const Slot& slot, int block) {
  const int blocks = ceil_div(x.k, BLOCK), lane = threadIdx.x % 32;
  const bool window_end = block / PROMOTIONS % WINDOW == WINDOW - 1;
  constexpr int PAIRS = FACTOR_ROWS * FACTORS, TURNS = ceil_div(PAIRS, 32);
  float factor[TURNS][PROMOTIONS + TELESCOPED];
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int pair = turn * 32 + lane;
    const int row = tile.row + pair / FACTORS * SCALE_ROWS;
    const int column = tile.column + pair % FACTORS * SCALE_COLUMNS;
    const bool exists = pair < PAIRS && row < x.to.m && column < x.to.n;
    const float* a_scale = x.a_scale + int64_t(row / BLOCK) * blocks + block;
    const float* b_scale = x.b_scale + int64_t(column / BLOCK) * blocks + block;
    float(&f)[PROMOTIONS + TELESCOPED] = factor[turn];
#pragma unroll
    for (int p = 0; p < PROMOTIONS + TELESCOPED; ++p) {
      const bool within = exists && block + p < blocks && !(p == PROMOTIONS && window_end);
      f[p] = within ? __fmul_rn(a_scale[p], b_scale[p]) : 0.0f;
    }
    if (TELESCOPED) {
      double sum = 0.0;
#pragma unroll
      for (int p = 0; p < PROMOTIONS; ++p) {
        f[p] = __fsub_rn(f[p], f[p + 1]);
        sum += f[p];
      }
      f[PROMOTIONS] = float(-BASE_FLOAT * sum);
    }
  }
  barrier_wait(empty(slot), slot.parity ^ 1);
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int pair = turn * 32 + lane;
    float* to = factors(slot) + pair / FACTORS * FACTOR_PITCH + pair % FACTORS;
    if (pair < PAIRS) {
#pragma unroll
      for (int p = 0; p < PROMOTIONS + TELESCOPED; ++p) to[p * FACTOR_TABLE] = factor[turn][p];
    }
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(full(slot));
}

// The warps take slots in turn: on one of the four schedulers alone the work would hold up its
// share of the multiplying.
DEVICE void scale_all(const Arguments& x, int warp) {
  const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
  Slot slot;
  int turn = 0;
  for (Tiles tiles(x.to); tiles.more(); tiles.next()) {
    const Tile tile = tiles.tile(rank);
    for (int k = 0; k < x.k; k += TILE_K, slot.next()) {
      if (turn == warp) scale(x, tile, slot, k / BLOCK);
      turn = turn == SCALE_WARPS - 1 ? 0 : turn + 1;
    }
  }
}

// A slot that this warp has read may be filled again, by every block that writes to it.
DEVICE void release(const Slot& slot, uint32_t rank) {
  const uint32_t lane = threadIdx.x % 32;
  if (CLUSTER == 1) {
    if (lane == 0) barrier_arrive(empty(slot));
  } else if (lane < CLUSTER && common(lane, rank)) {
    barrier_arrive_at(empty(slot), lane);
  }
}

// The sums of one group: int32 ones on their way through a block, or a window, of K, and fp32 ones.
struct Multiplier {
  float acc[ROWS][SUMS];
  int sums[ACCUMULATORS][SUMS];
  float correction[ROWS][FACTORS];
  int group;
  uint32_t rank;
  Slot slot;
  bool ready = false;  // the slot is known to be full

  DEVICE Multiplier(int group, uint32_t rank) : group(group), rank(rank) {}

  DEVICE void reset(int row) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[TELESCOPED ? row : 0][i] = BASE;
  }

  // Have the tensor cores multiply one block of K of 64 rows.
  DEVICE void issue(int row, int promotion) {
    const uint64_t a = wgmma_descriptor(shared_at(A_AT) + slot.index * A_BYTES +
                                        (group * ROWS + row) * 64 * TILE_K);
    const uint64_t b = wgmma_descriptor(shared_at(B_AT) + slot.index * B_BYTES);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK / 32; ++i) {
      const int at = 2 * (promotion * (BLOCK / 32) + i);  // 32 of K, in units of 16 bytes
      wgmma(sums[TELESCOPED ? row : 0], a + at, b + at, TELESCOPED || i > 0);
    }
    wgmma_commit();
  }

  DEVICE void read_factors(float (&to)[FACTORS], int row, int table) const {
    const int factor_row = (group * ROWS + row) * (64 / SCALE_ROWS) +
                           (BLOCK < 64 ? threadIdx.x / 64 % 2 : 0);
    const float* from = factors(slot) + table * FACTOR_TABLE + factor_row * FACTOR_PITCH;
#pragma unroll
    for (int i = 0; i < FACTORS; ++i) to[i] = from[i];
  }

  DEVICE void promote(int row, const float (&factor)[FACTORS]) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
      const int sum = sums[TELESCOPED ? row : 0][i];
      acc[row][i] = __fmaf_rn(factor[i / 4 * 8 / SCALE_COLUMNS],
                              TELESCOPED ? __int_as_float(sum) : __int2float_rn(sum), acc[row][i]);
    }
  }

  // Take off what the base of telescoped sums has added.
  DEVICE void correct(int row) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) acc[row][i] += correction[row][i / 4 * 8 / SCALE_COLUMNS];
#pragma unroll
    for (int i = 0; i < FACTORS; ++i) correction[row][i] = 0.0f;
  }

  // 3. One slot. Whether the next one is full is asked early, so that the answer costs no time.
  DEVICE void multiply() {
    if (!ready) barrier_wait(full(slot), slot.parity);
    const Slot old = slot;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int row = item % ROWS, promotion = item / ROWS;
      issue(row, promotion);
      float factor[FACTORS], added[FACTORS];
      read_factors(factor, row, promotion);
      if (TELESCOPED && promotion == PROMOTIONS - 1) read_factors(added, row, PROMOTIONS);
      wgmma_wait<0>();
      if (item == ITEMS - 1) {
        release(old, rank);
        slot.next();
        ready = barrier_try(full(slot), slot.parity);
      }
      promote(row, factor);
      if (TELESCOPED && promotion == PROMOTIONS - 1) {
#pragma unroll
        for (int i = 0; i < FACTORS; ++i) correction[row][i] += added[i];
      }
    }
  }

  DEVICE void tile(int steps) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) acc[row][i] = 0.0f;
#pragma unroll
      for (int i = 0; i < FACTORS; ++i) correction[row][i] = 0.0f;
      reset(row);
    }
    for (int step = 1; step <= steps; ++step) {
      multiply();
      if (!TELESCOPED || (step % WINDOW && step < steps)) continue;
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        reset(row);
        if (step % CORRECTED == 0 || step == steps) correct(row);
      }
    }
  }
};

// Address of a byte in a staging buffer of rows of `WIDTH` bytes, in TMA's swizzle of that width.
template <int WIDTH>
DEVICE uint32_t swizzled(uint32_t buffer, int row, int byte) {
  const uint32_t at = row * WIDTH + byte;
  return buffer + (at ^ (at >> 7 & (WIDTH / 16 - 1)) << 4);
}

// A group's staging buffers, in turn.
struct Staging {
  uint32_t base;
  int barrier;
  bool leader;
  int turn = 0;
  DEVICE Staging(int group)
      : base(shared_at(STAGING_AT) + group * BUFFERS * STAGING),
        barrier(1 + group),
        leader(threadIdx.x % 128 == 0) {}
  // A buffer that no store is reading.
  DEVICE uint32_t take() {
    if (leader) tma_wait_read<BUFFERS - 1>();
    named_barrier(barrier, 128);
    return base + turn * STAGING;
  }
  // Everyone has written it: store it.
  template <bool ADD>
  DEVICE void give(const TensorMap& map, int x, int y) {
    fence_async();
    named_barrier(barrier, 128);
    if (leader) {
      if (ADD) tma_add(map, base + turn * STAGING, x, y);
      else tma_store(map, base + turn * STAGING, x, y);
      tma_commit();
    }
    if (++turn == BUFFERS) turn = 0;
  }
};

DEVICE void stage_floats(const float (&acc)[SUMS], int panel, uint32_t buffer) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < PANEL_GROUPS; j += OUTPUT == FP32 ? 1 : 2) {
    const int i = 4 * (panel * PANEL_GROUPS + j);
    if constexpr (OUTPUT == FP32) {
      const int byte = 4 * (8 * j + lane_column());
      store_shared(swizzled<PANEL_BYTES>(buffer, lane_row(), byte), acc[i], acc[i + 1]);
      store_shared(swizzled<PANEL_BYTES>(buffer, lane_row() + 8, byte), acc[i + 2], acc[i + 3]);
    } else {
      const int row = threadIdx.x / 32 % 4 * 16 + lane % 16, byte = 16 * (j + lane / 16);
      store_matrices(swizzled<PANEL_BYTES>(buffer, row, byte), pack(acc[i], acc[i + 1]),
                     pack(acc[i + 2], acc[i + 3]), pack(acc[i + 4], acc[i + 5]),
                     pack(acc[i + 6], acc[i + 7]));
    }
  }
}

DEVICE void stage_codes(const uint16_t (&codes)[SUMS / 2], int panel, uint32_t buffer) {
#pragma unroll
  for (int j = 0; j < PANEL_GROUPS; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store_shared(swizzled<PANEL_BYTES>(buffer, lane_row() + 8 * half, 8 * j + lane_column()),
                   codes[2 * (panel * PANEL_GROUPS + j) + half]);
    }
  }
}

DEVICE void stage_turned(const uint16_t (&codes)[SUMS / 2], uint32_t buffer) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    store_shared(swizzled<64>(buffer, column_of(i), row_of(i)), uint8_t(codes[i / 2] >> i % 2 * 8));
  }
}

// 4. Floats of 64 rows on their way to memory.
DEVICE void finish_floats(float (&acc)[SUMS], const Arguments& x, Staging& staging, int row,
                          int column) {
  constexpr bool ADD = ACCUMULATE && OUTPUT == FP32 && TMA_OUT;
  if (ACCUMULATE && !ADD) add_held(acc, x.to, row, column);
  if constexpr (TMA_OUT) {
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
      stage_floats(acc, panel, staging.take());
      staging.give<ADD>(x.out, column + panel * PANEL_COLUMNS, row);
    }
  } else {
    store_direct(acc, x.to, row, column);
  }
}

// The largest |x| of each block that the group's rows lie in, from all warps that share it.
DEVICE void block_amax(float (&acc)[ROWS][SUMS], uint32_t (&amax)[ROWS][AMAX_BLOCKS],
                       const Arguments& x, int group, int turn, const Tile& tile) {
  auto at = [&](int part, int warp, int b) -> uint32_t& {
    return reinterpret_cast<uint32_t*>(
        shared + AMAX_AT)[((turn * GROUPS * ROWS + part) * 4 + warp) * AMAX_BLOCKS + b];
  };
  const int warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int part = group * ROWS + r;
    warp_amax(acc[r], amax[r], x.to, tile.row + 64 * part, tile.column);
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int b = 0; b < AMAX_BLOCKS; ++b) at(part, warp, b) = amax[r][b];
    }
  }
  constexpr int SHARING = BLOCK == 128 && ROWS == 1 ? 2 : 1;  // groups that share blocks
  named_barrier(SHARING == 2 ? 8 + group / 2 : 1 + group, 128 * SHARING);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int part = group * ROWS + r;
#pragma unroll
    for (int b = 0; b < AMAX_BLOCKS; ++b) {
      if constexpr (BLOCK == 32) {
        amax[r][b] = max(at(part, warp & 2, b), at(part, warp | 1, b));
      } else {
#pragma unroll
        for (int w = 0; w < (BLOCK == 128 ? 8 : 4); ++w) {
          const int first = BLOCK == 128 ? part / 2 * 2 : part;
          amax[r][b] = max(amax[r][b], at(first + w / 4, w % 4, b));
        }
      }
    }
  }
}

DEVICE void finish_codes(float (&acc)[ROWS][SUMS], const Arguments& x, Staging& staging,
                         int group, int turn, const Tile& tile) {
  uint32_t amax[ROWS][AMAX_BLOCKS];
  block_amax(acc, amax, x, group, turn, tile);
  const uint64_t seed = STOCHASTIC ? *x.to.seed : 0;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = tile.row + 64 * (group * ROWS + r);
    float multiplier[AMAX_BLOCKS];
#pragma unroll
    for (int b = 0; b < AMAX_BLOCKS; ++b) {
      float scale;
      block_scale(amax[r][b], scale, multiplier[b]);
      if (threadIdx.x % 32 == 0 && (row + lane_row()) % BLOCK == 0) {
        store_scale(scale, x.to, row + lane_row(), tile.column + b * BLOCK);
      }
    }
    uint16_t codes[SUMS / 2];
    to_codes(acc[r], multiplier, codes, seed, row, tile.column);
    if constexpr (Q && TMA_OUT) {
#pragma unroll
      for (int panel = 0; panel < PANELS; ++panel) {
        stage_codes(codes, panel, staging.take());
        staging.give<false>(x.out, tile.column + panel * PANEL_COLUMNS, row);
      }
    } else if constexpr (Q) {
      store_codes_direct(codes, x.to, row, tile.column);
    }
    if constexpr (TURNED && TMA_TURNED) {
      stage_turned(codes, staging.take());
      staging.give<false>(x.turned, row, tile.column);
    } else if constexpr (TURNED) {
      store_turned_direct(codes, x.to, row, tile.column);
    }
  }
}

DEVICE void consume(const Arguments& x, int group) {
  const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
  Multiplier multiplier(group, rank);
  Staging staging(group);
  int turn = 0;
  for (Tiles tiles(x.to); tiles.more(); tiles.next(), turn ^= 1) {
    multiplier.tile(ceil_div(x.k, TILE_K));
    const Tile tile = tiles.tile(rank);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) add_bias(multiplier.acc[r], x.to, tile.column);
    if constexpr (OUTPUT == INT8) {
      finish_codes(multiplier.acc, x, staging, group, turn, tile);
    } else {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int row = tile.row + 64 * (group * ROWS + r);
        finish_floats(multiplier.acc[r], x, staging, row, tile.column);
      }
    }
  }
  if (staging.leader) tma_wait_read<0>();
}

DEVICE void start_barriers() {
  for (Slot slot; slot.parity == 0; slot.next()) {
    barrier_init(full(slot), 2);
    barrier_init(empty(slot), 4 * GROUPS * (CLUSTER_M + CLUSTER_N - 1));
  }
  fence_barrier_init();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(128 * (GROUPS + 1), 1)
    gemm(const __grid_constant__ Arguments x) {
  // The same in all lanes, and shown to be, so that it lives in a uniform register.
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) start_barriers();
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();
  if (group == GROUPS) {
    give_registers<PRODUCER_REGISTERS>();
    if (warp == 0 && lane == 0) load(x);
    if (warp > 0) scale_all(x, warp - 1);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(x, group);
  }
  // A block's shared memory must outlast what its neighbours still send and signal.
  if (CLUSTER > 1) cluster_sync();
}
