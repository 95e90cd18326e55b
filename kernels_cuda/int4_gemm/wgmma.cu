// INT4 GEMM for sm_90a: C (m×n) = A (m×k) · Bᵀ (n×k) of codes in bytes, since Hopper multiplies none
// smaller; their int32 sums run over all of K, so that the only fp32 is the scale's. Codes lie in the
// high halves of their bytes: at the power limit half of the bits that never change are worth a ninth
// of the time (8192×7680×9728 on an H200: 733 µs, and 828 µs with codes in the low halves).
//
// One persistent block an SM walks over tiles of TILE_M×TILE_N. Its warps have two roles, which meet
// at the full and empty barriers of a ring of STAGES slots, each 128 of K deep:
//
//   1. load:     one thread fetches A and B by TMA, each block of a cluster its share of what the
//                cluster has in common, for all of it.
//   2. multiply: GROUPS warp groups each keep ROWS times 64×TILE_N on the tensor cores, one slot
//                ahead of the one that they give back; then each scales its sums and writes them by
//                TMA, and goes on with the next tile while the copy engine works.
//
// With SPLIT the steps of a tile along K are dealt to that many blocks, whose raw sums `reduce`
// (reduce.cu) adds up: integers, so that the result is the same to the bit.
#include "epilogue.cuh"

constexpr int TILE_M = 64 * ROWS * GROUPS;
constexpr int TILE_K = 128;
constexpr int SUMS = TILE_N / 2;  // a thread's, of 64 rows
constexpr int CLUSTER = CLUSTER_M * CLUSTER_N;
constexpr int A_BYTES = TILE_M * TILE_K, B_BYTES = TILE_N * TILE_K;
constexpr bool RAW = SPLIT > 1;

// A panel is what one TMA store writes: 64 rows of 128 bytes, or of 64 where those do not divide.
constexpr int ELEMENT_BYTES = RAW || OUTPUT == FP32 ? 4 : 2;
constexpr int ROW_BYTES = TILE_N * ELEMENT_BYTES;
constexpr int PANEL_BYTES = ROW_BYTES % 128 == 0 ? 128 : 64;
constexpr int PANELS = ROW_BYTES / PANEL_BYTES;
constexpr int PANEL_COLUMNS = PANEL_BYTES / ELEMENT_BYTES, PANEL_GROUPS = PANEL_COLUMNS / 8;
constexpr int STAGING = 64 * 128;

// Shared memory, in order.
constexpr int B_AT = STAGES * A_BYTES;
constexpr int STAGING_AT = B_AT + STAGES * B_BYTES;
constexpr int BARRIERS_AT = STAGING_AT + GROUPS * BUFFERS * STAGING;
constexpr int SHARED_BYTES = BARRIERS_AT + 16 * STAGES;
static_assert(SHARED_BYTES == EXPECTED_SHARED_BYTES, "legal() counts shared memory otherwise");

constexpr int GROUP_BARRIERS = 1;  // named barriers, one a group

struct Arguments {
  TensorMap a, b, out;
  Epilogue to;
  int k;
  int slab;  // rows of one split's raw sums
};

// The place in the ring, and how often it has gone round.
struct Slot {
  int index = 0;
  uint32_t parity = 0;
  DEVICE void next() {
    if (++index == STAGES) index = 0, parity ^= 1;
  }
};

struct Part {
  int row, column, split, first, steps;
};

// The tiles of a block (or its cluster), in turn: RASTER rows of (cluster) tiles are walked column by
// column, so that L2 holds what neighbours share; with SPLIT, all tiles of one part of K first.
struct Parts {
  int down, across, steps, tile;
  DEVICE explicit Parts(const Arguments& x)
      : down(ceil_div(rows_of(x.to), TILE_M * CLUSTER_M)),
        across(ceil_div(x.to.n, TILE_N * CLUSTER_N)),
        steps(ceil_div(PRODUCT == WGRAD ? min(x.to.counts[1], x.k) : x.k, TILE_K)),
        tile(blockIdx.x / CLUSTER) {}
  DEVICE bool more() const { return tile < down * across * SPLIT; }
  DEVICE void next() { tile += gridDim.x / CLUSTER; }
  DEVICE Part part(uint32_t rank) const {
    const int split = tile / (down * across), flat = tile % (down * across);
    const int above = flat / (RASTER * across) * RASTER;
    const int rows = min(down - above, RASTER);
    const int within = flat % (RASTER * across);
    const int row = (above + within % rows) * CLUSTER_M + int(rank) % CLUSTER_M;
    const int column = within / rows * CLUSTER_N + int(rank) / CLUSTER_M;
    const int first = steps * split / SPLIT;
    return {row * TILE_M, column * TILE_N, split, first, steps * (split + 1) / SPLIT - first};
  }
};

extern __shared__ __align__(1024) uint8_t shared[];

DEVICE uint32_t shared_at(int offset) { return shared_address(shared) + offset; }
DEVICE uint32_t full(const Slot& slot) { return shared_at(BARRIERS_AT + 16 * slot.index); }
DEVICE uint32_t empty(const Slot& slot) { return shared_at(BARRIERS_AT + 16 * slot.index + 8); }

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
  for (Parts parts(x); parts.more(); parts.next()) {
    const Part part = parts.part(rank);
    const int a_row = part.row + rank_n * A_SHARE, b_row = part.column + rank_m * B_SHARE;
    for (int step = part.first; step < part.first + part.steps; ++step, slot.next()) {
      const int k = step * TILE_K;
      barrier_wait(empty(slot), slot.parity ^ 1);
      barrier_expect(full(slot), A_BYTES + B_BYTES);
      const uint32_t a = shared_at(0) + slot.index * A_BYTES + rank_n * A_SHARE * TILE_K;
      const uint32_t b = shared_at(B_AT) + slot.index * B_BYTES + rank_m * B_SHARE * TILE_K;
      if (CLUSTER_N > 1) tma_load_multicast(a, x.a, k, a_row, full(slot), a_mask);
      else tma_load(a, x.a, k, a_row, full(slot));
      if (CLUSTER_M > 1) tma_load_multicast(b, x.b, k, b_row, full(slot), b_mask);
      else tma_load(b, x.b, k, b_row, full(slot));
    }
  }
}

// A slot that this warp has read may be filled again, by every block that writes to it.
DEVICE void release(const Slot& slot, uint32_t rank) {
  const uint32_t lane = threadIdx.x % 32;
  __syncwarp();  // one lane speaks for what all have read
  if (CLUSTER == 1) {
    if (lane == 0) barrier_arrive(empty(slot));
  } else if (lane < CLUSTER && common(lane, rank)) {
    barrier_arrive_at(empty(slot), lane);
  }
}

// 2. The sums of one group, on their way through K.
struct Multiplier {
  int sums[ROWS][SUMS];
  int group;
  uint32_t rank;
  Slot slot, held;  // the next to multiply, and the next to give back

  DEVICE Multiplier(int group, uint32_t rank) : group(group), rank(rank) {}

  DEVICE void issue(bool first) {
    barrier_wait(full(slot), slot.parity);
    const uint32_t a =
        wgmma_address(shared_at(0) + slot.index * A_BYTES + group * ROWS * 64 * TILE_K);
    const uint32_t b = wgmma_address(shared_at(B_AT) + slot.index * B_BYTES);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < TILE_K / 32; ++i) {
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {  // 32 of K are two units of 16 bytes
        wgmma(sums[row], wgmma_descriptor(a + 2 * i + row * (64 * TILE_K / 16)),
              wgmma_descriptor(b + 2 * i), i > 0 || !first);
      }
    }
    wgmma_commit();
    slot.next();
  }

  DEVICE void give_back() {
    release(held, rank);
    held.next();
  }

  DEVICE void multiply_all(int by) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) sums[row][i] *= by;
    }
  }

  // Steps from `from` on; the sums start from zero where that is 0.
  DEVICE void run(int from, int steps) {
    if (steps <= 0) return;
    issue(from == 0);
    for (int step = 1; step < steps; ++step) {
      issue(false);
      wgmma_wait<1>();
      give_back();
    }
    wgmma_wait<0>();
    give_back();
  }

  // `high` of the steps come first and weigh HIGH times as much.
  DEVICE void tile(int steps, int high) {
    if (steps == 0) multiply_all(0);
    run(0, high);
    if (PRODUCT == WGRAD && high > 0) multiply_all(HIGH);
    run(high, steps - high);
  }
};

DEVICE int lane_row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }
DEVICE int lane_column() { return threadIdx.x % 4 * 2; }

// Address of a byte in a staging buffer of rows of PANEL_BYTES, in TMA's swizzle of that width.
DEVICE uint32_t swizzled(uint32_t buffer, int row, int byte) {
  const uint32_t at = row * PANEL_BYTES + byte;
  return buffer + (at ^ (at >> 7 & (PANEL_BYTES / 16 - 1)) << 4);
}

// A group's staging buffers, in turn.
struct Staging {
  uint32_t base;
  int barrier;
  bool leader;
  int turn = 0;
  DEVICE explicit Staging(int group)
      : base(shared_at(STAGING_AT) + group * BUFFERS * STAGING),
        barrier(GROUP_BARRIERS + group),
        leader(threadIdx.x % 128 == 0) {}
  // A buffer that no store is reading.
  DEVICE uint32_t take() {
    if (leader) tma_wait_read<BUFFERS - 1>();
    named_barrier(barrier, 128);
    return base + turn * STAGING;
  }
  // Everyone has written it: store it.
  DEVICE void give(const TensorMap& map, int x, int y) {
    fence_async();
    named_barrier(barrier, 128);
    if (leader) {
      tma_store(map, base + turn * STAGING, x, y);
      tma_commit();
    }
    if (++turn == BUFFERS) turn = 0;
  }
};

// A panel's values into shared memory; `weight` is that of the thread's two rows.
DEVICE void stage(const int (&sums)[SUMS], int panel, uint32_t buffer, const Epilogue& to,
                  float scale, const float (&weight)[2], int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < PANEL_GROUPS; j += ELEMENT_BYTES == 4 ? 1 : 2) {
    const int i = 4 * (panel * PANEL_GROUPS + j), at = column + 8 * j + lane_column();
    auto value = [&](int k) {
      if (RAW) return __int_as_float(sums[i + k]);
      return finished(sums[i + k], to, scale, weight[k / 2 % 2], at + k / 4 * 8 + k % 2);
    };
    if constexpr (ELEMENT_BYTES == 4) {
      const int byte = 4 * (8 * j + lane_column());
      store_shared(swizzled(buffer, lane_row(), byte), value(0), value(1));
      store_shared(swizzled(buffer, lane_row() + 8, byte), value(2), value(3));
    } else {
      const int row = threadIdx.x / 32 % 4 * 16 + lane % 16, byte = 16 * (j + lane / 16);
      store_matrices(swizzled(buffer, row, byte), pack(value(0), value(1)),
                     pack(value(2), value(3)), pack(value(4), value(5)), pack(value(6), value(7)));
    }
  }
}

// Where the copy engine cannot write: a panel row by row, so that a warp's stores are neighbours.
DEVICE void store_panel(uint32_t buffer, const Epilogue& to, int row0, int column0) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll 4
  for (int i = 0; i < 16; ++i) {
    const int row = 16 * warp + i;
#pragma unroll
    for (int column = lane; column < PANEL_COLUMNS; column += 32) {
      const uint32_t from = swizzled(buffer, row, column * ELEMENT_BYTES);
      if (row0 + row >= to.m || column0 + column >= to.n) continue;
      const int64_t at = int64_t(row0 + row) * to.n + column0 + column;
      if constexpr (ELEMENT_BYTES == 4) static_cast<float*>(to.c)[at] = load_shared_float(from);
      else static_cast<uint16_t*>(to.c)[at] = load_shared_u16(from);
    }
  }
}

DEVICE void finish(const int (&sums)[SUMS], const Arguments& x, Staging& staging, float scale,
                   int row, int column, int split) {
  const float weight[2] = {weight_of(x.to, row + lane_row()),
                           weight_of(x.to, row + lane_row() + 8)};
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel) {
    const int at = column + panel * PANEL_COLUMNS;
    const uint32_t buffer = staging.take();
    stage(sums, panel, buffer, x.to, scale, weight, at);
    if constexpr (TMA_OUT || RAW) {
      staging.give(x.out, at, row + split * x.slab);
    } else {
      named_barrier(staging.barrier, 128);
      store_panel(buffer, x.to, row, at);
    }
  }
}

DEVICE void consume(const Arguments& x, int group) {
  const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
  Multiplier multiplier(group, rank);
  Staging staging(group);
  const float scale = scale_of(x.to);
  const int high = PRODUCT == WGRAD ? x.to.counts[0] / TILE_K : 0;
  for (Parts parts(x); parts.more(); parts.next()) {
    const Part part = parts.part(rank);
    multiplier.tile(part.steps, max(0, min(high - part.first, part.steps)));
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int row = part.row + 64 * (group * ROWS + r);
      finish(multiplier.sums[r], x, staging, scale, row, part.column, part.split);
    }
  }
  if (staging.leader) tma_wait_read<0>();
}

DEVICE void start_barriers() {
  for (Slot slot; slot.parity == 0; slot.next()) {
    barrier_init(full(slot), 1);
    barrier_init(empty(slot), 4 * GROUPS * (CLUSTER_M + CLUSTER_N - 1));
  }
  fence_barrier_init();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(128 * (GROUPS + 1), 1)
    gemm(const __grid_constant__ Arguments x) {
  // The same in all lanes, and shown to be, so that it lives in a uniform register.
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) start_barriers();
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();
  if (group == GROUPS) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x % 128 == 0) load(x);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(x, group);
  }
  // A block's shared memory must outlast what its neighbours still send and signal.
  if (CLUSTER > 1) cluster_sync();
}
