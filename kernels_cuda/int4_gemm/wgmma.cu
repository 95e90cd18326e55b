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
//                ahead of the one that they give back; then each scales its sums, makes INT8 codes of
//                them if those are asked for, writes by TMA, and goes on with the next tile while the
//                copy engine works.
//
// With SPLIT the steps of a tile along K are dealt to that many blocks, whose raw sums `reduce`
// (reduce.cu) adds up: integers, so that the result is the same to the bit.
#include "epilogue.cuh"
#include "hopper.cuh"

constexpr bool RAW = SPLIT > 1;
constexpr int WRITTEN_BYTES = RAW ? 4 : ELEMENT_BYTES;
using Panel = Panels<WRITTEN_BYTES>;
constexpr int PANEL_COLUMNS = Panel::COLUMNS;
constexpr int STAGING = 64 * 128;

// Of codes, the blocks across a tile, and the largest |x| of each in every sixteen rows.
constexpr int BLOCKS = TILE_N / OUT_BLOCK > 0 ? TILE_N / OUT_BLOCK : 1;
constexpr int SIXTEENS = 4 * ROWS;  // of a group
constexpr int AMAXES = OUTPUT == INT8 ? GROUPS * SIXTEENS * BLOCKS : 0;

constexpr int AMAX_AT = STAGING_AT + GROUPS * BUFFERS * STAGING;
constexpr int BARRIERS_AT = AMAX_AT + 4 * AMAXES;
constexpr int SHARED_BYTES = BARRIERS_AT + 16 * STAGES;
static_assert(SHARED_BYTES == EXPECTED_SHARED_BYTES, "legal() counts shared memory otherwise");

using Slot = RingSlot<BARRIERS_AT>;
using Staging = StagingBuffers<STAGING>;

struct Arguments {
  TensorMap a, b, out;
  Epilogue to;
  int k;
  int slab;  // rows of one split's raw sums
  float* scale;  // of codes
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

// A panel's values into shared memory; `weight` is that of the thread's two rows.
DEVICE void stage(const int (&sums)[SUMS], int panel, uint32_t buffer, const Epilogue& to,
                  float scale, const float (&weight)[2], int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < Panel::OCTETS; j += WRITTEN_BYTES == 4 ? 1 : 2) {
    const int i = 4 * (panel * Panel::OCTETS + j), at = column + 8 * j + lane_column();
    auto value = [&](int k) {
      if (RAW) return __int_as_float(sums[i + k]);
      return finished(sums[i + k], to, scale, weight[k / 2 % 2], at + k / 4 * 8 + k % 2);
    };
    if constexpr (WRITTEN_BYTES == 4) {
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
      store_panel<WRITTEN_BYTES>(buffer, x.to, row, at);
    }
  }
}

// --- codes ---------------------------------------------------------------------------------------

// As in gemm/wgmma.cu, but that no two groups share a block.

// Where a warp leaves the largest |x| of sixteen of the group's rows, in each block across.
DEVICE uint32_t* amax_of(int group, int sixteen) {
  return reinterpret_cast<uint32_t*>(shared + AMAX_AT) + (group * SIXTEENS + sixteen) * BLOCKS;
}

// The sums as they are stored. They hold nothing afterwards: wgmma reads even what it does not add
// to, for which registers would keep them. Nor are there any for more than half of the biases.
DEVICE void take_sums(float (&acc)[SUMS], int (&sums)[SUMS], const Target& to, float scale,
                      int column) {
#pragma unroll
  for (int first = 0; first < SUMS; first += SUMS / 2) {
    float bias[SUMS / 4];
    if (BIAS) load_bias(bias, to, column + 2 * first);
#pragma unroll
    for (int i = 0; i < SUMS / 2; ++i) {
      acc[first + i] = scaled(sums[first + i], scale);
      if (BIAS) acc[first + i] = __fadd_rn(acc[first + i], bias[i / 4 * 2 + i % 2]);
      asm volatile("" : "=r"(sums[first + i]));
    }
  }
}

DEVICE void leave_amax(float (&acc)[SUMS], const Target& to, uint32_t* amax_at, int row,
                       int column) {
  uint32_t amax[BLOCKS];
  warp_amax(acc, amax, to, row, column);
  if (threadIdx.x % 32 != 0) return;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) amax_at[b] = amax[b];
}

// Each lane divides for one block, tells the others what to multiply by, and writes the scale.
DEVICE void scale_blocks(float (&multiplier)[BLOCKS], const Target& to, int group, int sixteen,
                         int row, int column) {
  constexpr int SHARING = OUT_BLOCK / 16;  // a block's sixteens
  const int lane = threadIdx.x % 32, block = lane < BLOCKS ? lane : 0;
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < SHARING; ++i) {
    most = max(most, amax_of(group, sixteen / SHARING * SHARING + i)[block]);
  }
  float scale, own;
  block_scale(most, scale, own);
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) multiplier[b] = __shfl_sync(0xFFFFFFFFu, own, b);
  if (lane < BLOCKS && sixteen % SHARING == 0) {
    store_scale(scale, to, row, column + block * OUT_BLOCK);
  }
}

DEVICE void stage_codes(const uint16_t (&codes)[SUMS / 2], int panel, uint32_t buffer) {
  const uint32_t row = swizzled<Panel::BYTES>(buffer, lane_row(), lane_column());
#pragma unroll
  for (int j = 0; j < Panel::OCTETS; ++j) {
    const uint32_t at = (row ^ j / 2 << 4) + j % 2 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // eight rows down, where the swizzle is the same
      store_shared(at + 8 * half * Panel::BYTES, codes[2 * (panel * Panel::OCTETS + j) + half]);
    }
  }
}

DEVICE void finish_codes(int (&sums)[ROWS][SUMS], const Arguments& x, Staging& staging,
                         float scale, int group, const Tile& tile) {
  const Target to = target_of(x.to, x.scale);
  const int warp = threadIdx.x / 32 % 4, first = tile.row + 64 * ROWS * group;
  float acc[ROWS][SUMS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    take_sums(acc[r], sums[r], to, scale, tile.column);
    leave_amax(acc[r], to, amax_of(group, 4 * r + warp), first + 64 * r, tile.column);
  }
  staging.take();  // what the barrier shows to all is also the others' largest |x|
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = first + 64 * r;
    float multiplier[BLOCKS];
    scale_blocks(multiplier, to, group, 4 * r + warp, row + 16 * warp, tile.column);
    multiply_blocks(acc[r], multiplier, 0);
    uint16_t codes[SUMS / 2];
    to_codes(acc[r], codes, Draw{}, tile.column);  // which are rounded to nearest
    if constexpr (TMA_OUT) {
#pragma unroll
      for (int panel = 0; panel < Panel::COUNT; ++panel) {
        stage_codes(codes, panel, r + panel == 0 ? staging.buffer() : staging.take());
        staging.give(x.out, tile.column + panel * PANEL_COLUMNS, row);
      }
    } else {
      store_codes_direct(codes, to, row, tile.column);
    }
  }
  // Nobody leaves the next tile's largest |x| before all have read these: `give` waited for it too.
  if constexpr (!TMA_OUT) named_barrier(staging.barrier, 128);
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
    if constexpr (OUTPUT == INT8) {
      finish_codes(multiplier.sums, x, staging, scale, group, part.tile);
    } else {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int row = part.tile.row + 64 * (group * ROWS + r);
        finish(multiplier.sums[r], x, staging, scale, row, part.tile.column, part.split);
      }
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
