// INT4 GEMM for sm_90a: C (m×n) = A (m×k) · Bᵀ (n×k) of codes in bytes, since Hopper multiplies none
// smaller; their int32 sums run over all of K, so that the only fp32 is the scale's. Codes lie in the
// high halves of their bytes: at the power limit half of the bits that never change are worth a ninth
// of the time (8192×7680×9728 on an H200: 733 µs, and 828 µs with codes in the low halves).
//
// One persistent block an SM walks over tiles of TILE_M×TILE_N. Its warps have two roles, which meet
// at the full and empty barriers of a ring of STAGES slots, each 128 of K deep. The code of the ring,
// its loading and the staging buffers is in hopper.cuh.
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
#include "hopper.cuh"

constexpr bool RAW = SPLIT > 1;
constexpr int ELEMENT_BYTES = RAW || OUTPUT == FP32 ? 4 : 2;
using Panel = Panels<ELEMENT_BYTES>;
constexpr int PANEL_COLUMNS = Panel::COLUMNS;
constexpr int STAGING = 64 * 128;

constexpr int BARRIERS_AT = STAGING_AT + GROUPS * BUFFERS * STAGING;
constexpr int SHARED_BYTES = BARRIERS_AT + 16 * STAGES;
static_assert(SHARED_BYTES == EXPECTED_SHARED_BYTES, "legal() counts shared memory otherwise");

using Slot = RingSlot<BARRIERS_AT>;
using Staging = StagingBuffers<STAGING>;

struct Arguments {
  TensorMap a, b, out;
  Epilogue to;
  int k;
  int slab;  // rows of one split's raw sums
};

struct Part {
  Tile tile;
  int split, first, steps;
};

// What a block (or its cluster) computes, in turn; with SPLIT, all tiles of one part of K first.
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
    const Tile at = tile_at(flat, down, across, rank);
    const int first = steps * split / SPLIT;
    return {at, split, first, steps * (split + 1) / SPLIT - first};
  }
};

// 2. The sums of one group, on their way through K.
struct Multiplier {
  int sums[ROWS][SUMS];
  int group;
  uint32_t rank;
  Slot slot, held;  // the next to multiply, and the next to give back

  DEVICE Multiplier(int group, uint32_t rank) : group(group), rank(rank) {}

  DEVICE void issue(bool first) {
    barrier_wait(slot.full(), slot.parity);
    const uint32_t a = wgmma_address(slot.a() + group * ROWS * 64 * TILE_K);
    const uint32_t b = wgmma_address(slot.b());
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
    held.release(rank);
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

// A panel's values into shared memory; `weight` is that of the thread's two rows.
DEVICE void stage(const int (&sums)[SUMS], int panel, uint32_t buffer, const Epilogue& to,
                  float scale, const float (&weight)[2], int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < Panel::OCTETS; j += ELEMENT_BYTES == 4 ? 1 : 2) {
    const int i = 4 * (panel * Panel::OCTETS + j), at = column + 8 * j + lane_column();
    auto value = [&](int k) {
      if (RAW) return __int_as_float(sums[i + k]);
      return finished(sums[i + k], to, scale, weight[k / 2 % 2], at + k / 4 * 8 + k % 2);
    };
    if constexpr (ELEMENT_BYTES == 4) {
      const int byte = 4 * (8 * j + lane_column());
      store_shared(swizzled<Panel::BYTES>(buffer, lane_row(), byte), value(0), value(1));
      store_shared(swizzled<Panel::BYTES>(buffer, lane_row() + 8, byte), value(2), value(3));
    } else {
      const int row = threadIdx.x / 32 % 4 * 16 + lane % 16, byte = 16 * (j + lane / 16);
      store_matrices(swizzled<Panel::BYTES>(buffer, row, byte), pack(value(0), value(1)),
                     pack(value(2), value(3)), pack(value(4), value(5)), pack(value(6), value(7)));
    }
  }
}

DEVICE void finish(const int (&sums)[SUMS], const Arguments& x, Staging& staging, float scale,
                   int row, int column, int split) {
  const float weight[2] = {weight_of(x.to, row + lane_row()),
                           weight_of(x.to, row + lane_row() + 8)};
#pragma unroll
  for (int panel = 0; panel < Panel::COUNT; ++panel) {
    const int at = column + panel * PANEL_COLUMNS;
    const uint32_t buffer = staging.take();
    stage(sums, panel, buffer, x.to, scale, weight, at);
    if constexpr (TMA_OUT || RAW) {
      staging.give(x.out, at, row + split * x.slab);
    } else {
      named_barrier(staging.barrier, 128);
      store_panel<ELEMENT_BYTES>(buffer, x.to, row, at);
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
      const int row = part.tile.row + 64 * (group * ROWS + r);
      finish(multiplier.sums[r], x, staging, scale, row, part.tile.column, part.split);
    }
  }
  if (staging.leader) tma_wait_read<0>();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(128 * (GROUPS + 1), 1)
    gemm(const __grid_constant__ Arguments x) {
  // The same in all lanes, and shown to be, so that it lives in a uniform register.
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) start_barriers<Slot>(1);
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();
  if (group == GROUPS) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x % 128 == 0) load<Slot, Parts>(x);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(x, group);
  }
  // A block's shared memory must outlast what its neighbours still send and signal.
  if (CLUSTER > 1) cluster_sync();
}
