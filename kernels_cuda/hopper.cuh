// What GEMMs for sm_90a do alike, whatever they multiply and make of it. One persistent block an SM
// walks over tiles of TILE_M×TILE_N. Operands come by TMA through a ring of STAGES slots in shared
// memory, each 128 of K deep, with a full and an empty barrier each. GROUPS warp groups multiply,
// and write their rows by TMA from staging buffers of their own.
#pragma once

#include "config.cuh"
#include "ptx.cuh"

constexpr int TILE_M = 64 * ROWS * GROUPS;
constexpr int TILE_K = 128;
constexpr int SUMS = TILE_N / 2;  // a thread's, of 64 rows
constexpr int CLUSTER = CLUSTER_M * CLUSTER_N;

// Shared memory begins with the slots' A, their B and the staging buffers; what follows is each
// kernel's own.
constexpr int A_BYTES = TILE_M * TILE_K, B_BYTES = TILE_N * TILE_K;
constexpr int A_AT = 0;
constexpr int B_AT = A_AT + STAGES * A_BYTES;
constexpr int STAGING_AT = B_AT + STAGES * B_BYTES;

// The first of the named barriers: one a group, four at most.
constexpr int GROUP_BARRIERS = 1;

extern __shared__ __align__(1024) uint8_t shared[];

DEVICE uint32_t shared_at(int offset) { return shared_address(shared) + offset; }

// --- tiles ---------------------------------------------------------------------------------------

struct Tile {
  int row, column;
};

// Of `down`×`across` (cluster) tiles this block's of the one with an index. RASTER rows of them are
// walked column by column, so that L2 holds what neighbours share. By reference: with values NVRTC
// 13.0 orders instructions of the INT8 GEMM otherwise than where its profiles were tuned.
DEVICE Tile tile_at(const int& index, const int& down, const int& across, uint32_t rank) {
  const int above = index / (RASTER * across) * RASTER;
  const int rows = min(down - above, RASTER);
  const int within = index % (RASTER * across);
  const int row = (above + within % rows) * CLUSTER_M + int(rank) % CLUSTER_M;
  const int column = within / rows * CLUSTER_N + int(rank) / CLUSTER_M;
  return {row * TILE_M, column * TILE_N};
}

// Blocks of the cluster that have rows of A, or columns of B, in common.
DEVICE constexpr bool common(uint32_t a, uint32_t b) {
  return a % CLUSTER_M == b % CLUSTER_M || a / CLUSTER_M == b / CLUSTER_M;
}

// --- ring ----------------------------------------------------------------------------------------

// The place in the ring whose barriers lie at BARRIERS_AT, and how often it has gone round.
template <int BARRIERS_AT>
struct RingSlot {
  int index = 0;
  uint32_t parity = 0;
  DEVICE void next() {
    if (++index == STAGES) index = 0, parity ^= 1;
  }
  DEVICE uint32_t full() const { return shared_at(BARRIERS_AT + 16 * index); }
  DEVICE uint32_t empty() const { return shared_at(BARRIERS_AT + 16 * index + 8); }
  DEVICE uint32_t a() const { return shared_at(A_AT) + index * A_BYTES; }
  DEVICE uint32_t b() const { return shared_at(B_AT) + index * B_BYTES; }
  // This warp has read it: it may be filled again, by every block that writes to it.
  DEVICE void release(uint32_t rank) const {
    const uint32_t lane = threadIdx.x % 32;
    __syncwarp();  // one lane speaks for what all have read
    if (CLUSTER == 1) {
      if (lane == 0) barrier_arrive(empty());
    } else if (lane < CLUSTER && common(lane, rank)) {
      barrier_arrive_at(empty(), lane);
    }
  }
};

// `fillers` arrive at a slot's full barrier, and at its empty one each warp that reads it.
template <class Slot>
DEVICE void start_barriers(int fillers) {
  for (Slot slot; slot.parity == 0; slot.next()) {
    barrier_init(slot.full(), fillers);
    barrier_init(slot.empty(), 4 * GROUPS * (CLUSTER_M + CLUSTER_N - 1));
  }
  fence_barrier_init();
}

// A block of a cluster fetches its share of what these have in common, for all of them: its place
// among them, and who they are.
constexpr int A_SHARE = TILE_M / CLUSTER_N, B_SHARE = TILE_N / CLUSTER_M;
struct Share {
  uint32_t rank_m, rank_n;
  uint16_t a_mask, b_mask;
};

// Fill a slot, once it is empty, with rows of two matrices from `k` on.
template <class Slot>
DEVICE void fetch(const Slot& slot, const Share& share, const TensorMap& a_map,
                  const TensorMap& b_map, int a_row, int b_row, int k) {
  barrier_wait(slot.empty(), slot.parity ^ 1);
  barrier_expect(slot.full(), A_BYTES + B_BYTES);
  const uint32_t a = slot.a() + share.rank_n * A_SHARE * TILE_K;
  const uint32_t b = slot.b() + share.rank_m * B_SHARE * TILE_K;
  if (CLUSTER_N > 1) tma_load_multicast(a, a_map, k, a_row, slot.full(), share.a_mask);
  else tma_load(a, a_map, k, a_row, slot.full());
  if (CLUSTER_M > 1) tma_load_multicast(b, b_map, k, b_row, slot.full(), share.b_mask);
  else tma_load(b, b_map, k, b_row, slot.full());
}

// One thread keeps the ring full of A and B, of what `Parts` gives its block to do, in turn.
template <class Slot, class Parts, class Arguments>
DEVICE void load(const Arguments& x) {
  const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
  const uint32_t rank_m = rank % CLUSTER_M, rank_n = rank / CLUSTER_M;
  uint16_t a_mask = 0, b_mask = 0;
  for (int i = 0; i < CLUSTER_N; ++i) a_mask |= 1 << (rank_m + CLUSTER_M * i);
  for (int i = 0; i < CLUSTER_M; ++i) b_mask |= 1 << (i + CLUSTER_M * rank_n);
  const Share share{rank_m, rank_n, a_mask, b_mask};
  Slot slot;
  for (Parts parts(x); parts.more(); parts.next()) {
    const auto part = parts.part(rank);
    const int a_row = part.tile.row + rank_n * A_SHARE;
    const int b_row = part.tile.column + rank_m * B_SHARE;
    for (int step = part.first; step < part.first + part.steps; ++step, slot.next()) {
      const int k = step * TILE_K;
      fetch(slot, share, x.a, x.b, a_row, b_row, k);
    }
  }
}

// --- staging -------------------------------------------------------------------------------------

// A panel is what one TMA store writes: 64 rows of as wide a swizzle as divides a tile's.
template <int ELEMENT>
struct Panels {
  static constexpr int ROW_BYTES = TILE_N * ELEMENT;
  static constexpr int BYTES = ROW_BYTES % 128 == 0 ? 128 : ROW_BYTES % 64 == 0 ? 64 : 32;
  static constexpr int COUNT = ROW_BYTES / BYTES;
  static constexpr int COLUMNS = BYTES / ELEMENT, OCTETS = COLUMNS / 8;  // of columns
};

// Address of a byte in a staging buffer of rows of `WIDTH` bytes, in TMA's swizzle of that width.
template <int WIDTH>
DEVICE uint32_t swizzled(uint32_t buffer, int row, int byte) {
  const uint32_t at = row * WIDTH + byte;
  return buffer + (at ^ (at >> 7 & (WIDTH / 16 - 1)) << 4);
}

// A group's BUFFERS staging buffers, in turn.
template <int BYTES>
struct StagingBuffers {
  uint32_t base;
  int barrier;
  bool leader;
  int turn = 0;
  DEVICE explicit StagingBuffers(int group)
      : base(shared_at(STAGING_AT) + group * BUFFERS * BYTES),
        barrier(GROUP_BARRIERS + group),
        leader(threadIdx.x % 128 == 0) {}
  // Wait for the next buffer's last store to have read it; the others know at their next barrier.
  DEVICE void wait() const {
    if (leader) tma_wait_read<BUFFERS - 1>();
  }
  DEVICE uint32_t buffer() const { return base + turn * BYTES; }
  // A buffer that no store is reading.
  DEVICE uint32_t take() {
    wait();
    named_barrier(barrier, 128);
    return buffer();
  }
  // Everyone has written it: store it.
  template <bool ADD = false>
  DEVICE void give(const TensorMap& map, int x, int y) {
    fence_async();
    named_barrier(barrier, 128);
    if (leader) {
      if (ADD) tma_add(map, buffer(), x, y);
      else tma_store(map, buffer(), x, y);
      tma_commit();
    }
    if (++turn == BUFFERS) turn = 0;
  }
};

// Where the copy engine cannot write: a panel row by row, so that a warp's stores are neighbours.
template <int ELEMENT, class Target>
DEVICE void store_panel(uint32_t buffer, const Target& to, int row0, int column0) {
  using Panel = Panels<ELEMENT>;
  constexpr int LANES = Panel::COLUMNS < 32 ? Panel::COLUMNS : 32;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll 4
  for (int i = 0; i < 16; ++i) {
    const int row = 16 * warp + i;
#pragma unroll
    for (int column = lane; column < Panel::COLUMNS; column += LANES) {
      const uint32_t from = swizzled<Panel::BYTES>(buffer, row, column * ELEMENT);
      if (row0 + row >= to.m || column0 + column >= to.n) continue;
      const int64_t at = int64_t(row0 + row) * to.n + column0 + column;
      if constexpr (ELEMENT == 4) static_cast<float*>(to.c)[at] = load_shared_float(from);
      else static_cast<uint16_t*>(to.c)[at] = load_shared_u16(from);
    }
  }
}
