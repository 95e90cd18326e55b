// What GEMMs in mma.sync do alike, whatever they multiply and make of it: where a block's tile is,
// and how its operands come through a ring of slots in shared memory to the tensor cores.
#pragma once

#include "config.cuh"
#include "ptx_sm80.cuh"

constexpr int TILE_BYTES = 128;  // of K, in a slot
constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int WARP_M = TILE_M / WARPS_M, WARP_N = TILE_N / WARPS_N;
constexpr int CHUNKS = WARP_M / 16;  // of sixteen rows
constexpr int SUMS = WARP_N / 2;     // a thread's, of a chunk

constexpr int A_BYTES = TILE_M * TILE_BYTES, B_BYTES = TILE_N * TILE_BYTES;
constexpr int SLOT_BYTES = A_BYTES + B_BYTES;
constexpr int RING_BYTES = STAGES * SLOT_BYTES;

extern __shared__ __align__(1024) uint8_t shared[];  // the ring comes first

DEVICE uint32_t shared_at(int offset) { return shared_address(shared) + offset; }

// Offset of a 16-byte chunk in rows of `WIDTH` bytes, permuted by the row's number, so that neither
// copies nor ldmatrix meet a bank twice.
template <int WIDTH>
DEVICE int swizzled(int row, int chunk) {
  if (WIDTH >= 128) return row * WIDTH + ((chunk ^ row % 8) << 4);
  const int at = row * WIDTH + chunk * 16;  // in lines of 128 bytes that hold several rows
  return at ^ (at >> 7 & (WIDTH / 16 - 1)) << 4;
}

// --- place -------------------------------------------------------------------------------------

struct Place {
  int row, column;
};

// Where this block's tile of an m×n output begins. RASTER rows of tiles are walked column by column,
// so that L2 holds what neighbours share. Cheap to ask again: no register need keep it.
template <class Output>
DEVICE Place tile_place(const Output& to) {
  const int down = ceil_div(to.m, TILE_M), across = ceil_div(to.n, TILE_N);
  const int index = block_index();
  const int first = index / (RASTER * across) * RASTER;
  const int rows = min(down - first, RASTER);
  const int within = index % (RASTER * across);
  return {(first + within % rows) * TILE_M, within / rows * TILE_N};
}

// Of a warp's share, within the tile.
DEVICE Place warp_place() {
  const int warp = threadIdx.x / 32;
  return {warp % WARPS_M * WARP_M, warp / WARPS_M * WARP_N};
}

// --- load --------------------------------------------------------------------------------------

// A thread's share of one operand: of every STEP-th row, 16 bytes of each slot.
//
// `Extent` is what its kernel knows of the rows: `within(at)`, how many of the sixteen there are when
// a slot begins at byte `at` of K, and `copy_unaligned(to, from, bytes)`, which does for any address
// what cp.async does for COPY_BYTES. AT_ONCE copies may have their addresses prepared together.
template <int ROWS, class Extent, int AT_ONCE = ROWS / (THREADS / 8)>
struct Operand {
  static constexpr int STEP = THREADS / 8;
  static_assert(ROWS % STEP == 0, "whole rows for every thread");
  const int8_t* from;
  int64_t pitch;
  Extent extent;
  int left;  // rows, from this thread's first on

  DEVICE Operand(const int8_t* matrix, int64_t pitch, const Extent& extent, int rows, int row0)
      : from(matrix + (row0 + threadIdx.x / 8) * pitch + threadIdx.x % 8 * 16),
        pitch(pitch),
        extent(extent),
        left(rows - row0 - threadIdx.x / 8) {}

  // The next 128 bytes of K, from `at` on; zeros beyond the edges.
  DEVICE void copy(uint32_t slot, int at) const {
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const int within = extent.within(at);
    const int8_t* p = from + at;
    // Bytes that lie anywhere take registers to put in place.
#pragma unroll(COPY_BYTES == 1 ? 1 : AT_ONCE)
    for (int i = 0; i < ROWS / STEP; ++i, p += STEP * pitch) {
      const uint32_t to = slot + swizzled<TILE_BYTES>(row + i * STEP, chunk);
      const int bytes = i * STEP < left ? within : 0;
      if constexpr (COPY_BYTES == 1) {
        extent.copy_unaligned(to, p, bytes);
      } else {
#pragma unroll
        for (int part = 0; part < 16; part += COPY_BYTES) {
          copy_async<COPY_BYTES>(to + part, p + part, min(max(bytes - part, 0), COPY_BYTES));
        }
      }
    }
  }
};

// --- multiply ----------------------------------------------------------------------------------

// A lane's addresses of its warp's first fragments, from a slot's beginning. A product further on is
// another chunk's place, which the row's number permutes too: an exclusive or with 32 for each.
struct Fragments {
  uint32_t a_at, b_at;

  DEVICE Fragments() {
    const int lane = threadIdx.x % 32;
    const Place warp = warp_place();
    // A's four matrices are rows 0…7 and 8…15 of the first half of a product's K, then of the
    // second; B's are the halves of rows 0…7, then of rows 8…15.
    a_at = swizzled<TILE_BYTES>(warp.row + lane % 16, lane / 16);
    b_at = A_BYTES + swizzled<TILE_BYTES>(warp.column + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }
};

// STAGES slots, of which all but the one that is multiplied are full or being filled. A loader's
// `copy(slot, step)` starts and commits a step's copies, of none beyond the last; a multiplier's
// `slot(slot)` takes a slot's products.
struct Ring {
  int slot = 0, step = 0;

  template <class Loader>
  DEVICE void start(const Loader& loader) {
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) loader.copy(i, i);
  }

  template <class Multiplier, class Loader>
  DEVICE void run(Multiplier& multiplier, const Loader& loader, int end) {
#pragma unroll 1
    for (; step < end; ++step) {
      copy_wait<STAGES - 2>();
      __syncthreads();  // the slot is full for all, and the one before it read by all
      loader.copy(slot == 0 ? STAGES - 1 : slot - 1, step + STAGES - 1);
      multiplier.slot(slot);
      if (++slot == STAGES) slot = 0;
    }
  }

  // Its memory may hold something else now.
  DEVICE void finish() {
    copy_wait<0>();
    __syncthreads();
  }
};
