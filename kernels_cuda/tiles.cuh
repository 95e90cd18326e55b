// Tiles of 128×128 codes on their way through shared memory, and the parts of them that warps have.
//
// Blocks of the grid go over tiles, one turn each, while the next tiles are on their way to shared
// memory. A tile is 16 parts of 32×32 codes, of which a warp has PARTS. A part has one scale of
// each operand. What shared memory holds is a ring of STAGES tiles,
//
//   uint8_t codes[STAGES][OPERANDS][TILE * TILE];  // units of 16 lie where `unit_at` says
//   float scales[STAGES][OPERANDS][PARTS_OF_TILE];
//   uint64_t arrived[STAGES];                      // barriers: a tile's codes have come; if TMA
//
// and what a kernel has beside it; its arguments have `inputs` (Matrix), their `maps`, m and n.
#pragma once

#include "codes.cuh"
#include "config.cuh"

constexpr int TILE = 128, ACROSS = TILE / SIDE, PARTS_OF_TILE = ACROSS * ACROSS;
constexpr int BOX = TILE / 2, BOXES = TILE / BOX;  // columns of a box of bf16
constexpr int THREADS = 32 * WARPS, PARTS = PARTS_OF_TILE / WARPS;
constexpr float LARGEST = 0x1.fffffep127f;  // of fp32

struct Matrix {
  const uint8_t* codes;
  const float* scales;
  int64_t pitch, scale_pitch;  // elements from row to row
};

// One of the tiles in shared memory.
struct Tile {
  const uint8_t* codes;
  const float* scales;
  template <class Ring>
  DEVICE Tile(const Ring& ring, int stage)
      : codes(ring.codes[stage][0]), scales(ring.scales[stage][0]) {}
  DEVICE float scale(int operand, int part) const { return scales[operand * PARTS_OF_TILE + part]; }
};

extern __shared__ __align__(1024) uint8_t memory[];  // TMA's swizzle wants it

// --- places --------------------------------------------------------------------------------------

// Where a row's unit of 16 bytes lies: as TMA's 128-byte swizzle has it.
DEVICE int unit_at(int row, int unit) { return row * TILE + 16 * (unit ^ row % 8); }

DEVICE int row_of(int part) { return part / ACROSS * SIDE; }
DEVICE int column_of(int part) { return part % ACROSS * SIDE; }

// A lane's four rows of a part go in the order 0, 1, 2, 3 or 2, 3, 0, 1. So the lanes of a half
// warp, which have eight codes each of four rows that are four apart, read all banks once.
struct Lane {
  int warp, index, row, column;  // its first row and column of a part
  int at;                        // where its first codes lie in a tile, of part 0
  bool exchanged;                // rows come in the second order
  DEVICE Lane()
      : warp(__shfl_sync(ALL, threadIdx.x / 32, 0)), index(threadIdx.x % 32),
        row(index / 4 * TALL), column(index % 4 * WIDE), exchanged(index / 8 % 2) {
    row += exchanged ? 2 : 0;
    at = unit_at(row, column / 16) + column % 16;
    asm volatile("" : "+r"(at));  // or it would be made anew for each use
  }
  DEVICE int row_at(int k) const { return row ^ k; }
  // Where its codes of row_at(k) of a part lie, from the part's first row on.
  DEVICE int place(int part, int k) const {
    // As `unit_at` of these and the part's columns: no two of them have a bit in common.
    return at ^ column_of(part) ^ k * (TILE + 16);
  }
  DEVICE uint2 codes(const Tile& tile, int operand, int part, int k) const {
    const int to = place(part, k);
    const uint8_t* from = tile.codes + operand * TILE * TILE + row_of(part) * TILE;
    return *reinterpret_cast<const uint2*>(from + to);
  }
};

// A lane that reads bf16, of which rows of two boxes of 64 columns are as long as those of codes.
struct PairLane : Lane {
  int pairs_at;  // where its first pairs lie in a box, of part 0
  DEVICE PairLane() : pairs_at(unit_at(row, column / 8)) {
    asm volatile("" : "+r"(pairs_at));  // or it would be made anew for each use
  }
  // Its row k of a part of `boxes`, each of `rows` rows.
  template <int ROWS>
  DEVICE uint4* pairs(uint16_t (*boxes)[ROWS * BOX], int part, int k) const {
    const int to = pairs_at ^ column_of(part) % BOX * 2 ^ k * (TILE + 16);
    uint16_t* box = boxes[column_of(part) / BOX] + row_of(part) * BOX;
    return reinterpret_cast<uint4*>(reinterpret_cast<uint8_t*>(box) + to);
  }
};

// A tile of those that a block of the grid goes over, numbered along rows.
struct Place {
  int row, column;  // in tiles
  DEVICE Place(int index, int across) : row(index / across), column(index % across) {}
  DEVICE void advance(const Place& step, int across) {
    row += step.row;
    column += step.column;
    if (column >= across) column -= across, ++row;
  }
};

// --- pairs of bf16 ------------------------------------------------------------------------------

DEVICE float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
DEVICE float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// The larger magnitudes of two pairs of bf16, NaN above all; what their signs are is not said.
DEVICE uint32_t max_magnitudes(uint32_t a, uint32_t b) {
  uint32_t most;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}

// The larger magnitude of a pair, as a float's bits.
DEVICE uint32_t larger_magnitude(uint32_t pair) {
  return max(pair << 16 & 0x7FFF0000u, pair & 0x7FFF0000u);
}

// Eight columns of a lane's four rows, pairs of bf16.
struct Pairs {
  uint32_t pairs[TALL][WIDE / 2];
  DEVICE float at(int k, int j) const {
    const uint32_t pair = pairs[k][j / 2];
    return j % 2 ? high_bf16(pair) : low_bf16(pair);
  }
  // The bits of the largest magnitude, as a float's.
  DEVICE uint32_t largest() const {
    uint32_t most = 0;
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
#pragma unroll
      for (int j = 0; j < WIDE / 2; ++j) most = max_magnitudes(most, pairs[k][j]);
    }
    return larger_magnitude(most);
  }
};

// --- loading -------------------------------------------------------------------------------------

DEVICE void copy_float(float& to, const float* from, int64_t at, bool inside) {
  copy_async<4>(shared_address(&to), from + at, inside ? 4 : 0);
}

// Rows of 128 codes at any address, zeros beyond the matrix, by some threads.
template <int ROWS, int COUNT>
DEVICE void copy_codes(uint8_t* to, const Matrix& from, int row0, int column0, int m, int n,
                       int thread) {
#pragma unroll 1
  for (int i = thread; i < ROWS * TILE; i += COUNT) {
    const int row = i / TILE, within = i % TILE;
    const bool inside = row0 + row < m && column0 + within < n;
    const uint8_t* source = from.codes + (row0 + row) * from.pitch + column0 + within;
    to[unit_at(row, within / 16) + within % 16] = inside ? *source : 0;
  }
}

// The same of bf16, in two boxes.
template <int ROWS, int COUNT>
DEVICE void copy_pairs(uint16_t (*to)[ROWS * BOX], const uint16_t* from, int64_t pitch, int row0,
                       int column0, int m, int n, int thread) {
#pragma unroll 1
  for (int i = thread; i < ROWS * TILE; i += COUNT) {
    const int row = i / TILE, within = i % TILE;
    const bool inside = row0 + row < m && column0 + within < n;
    const uint16_t* source = from + (row0 + row) * pitch + column0 + within;
    const int at = unit_at(row, within % BOX / 8) / 2 + within % 8;
    to[within / BOX][at] = inside ? *source : 0;
  }
}

// Have a tile's codes and scales come; both are 0 beyond the matrix.
template <class Ring, class Arguments>
DEVICE void fetch_codes(Ring& ring, int stage, int row0, int column0, const Arguments& p) {
  auto& codes = ring.codes[stage];
  constexpr int OPERANDS = sizeof(codes) / sizeof(codes[0]);
  if constexpr (!TMA) {
#pragma unroll
    for (int i = 0; i < OPERANDS; ++i) {
      copy_codes<TILE, THREADS>(codes[i], p.inputs[i], row0, column0, p.m, p.n, threadIdx.x);
    }
  }
  constexpr int LOADING = OPERANDS > 2 ? 64 : 32;  // threads, in whole warps
  if (threadIdx.x >= LOADING) return;
  if (TMA && threadIdx.x == 0) {
    const uint32_t arrived = shared_address(&ring.arrived[stage]);
    barrier_expect(arrived, sizeof(codes));
#pragma unroll
    for (int i = 0; i < OPERANDS; ++i) {
      tma_load(shared_address(codes[i]), p.maps[i], column0, row0, arrived);
    }
  }
#pragma unroll
  for (int i = 0; i < OPERANDS; ++i) {
    if (threadIdx.x / PARTS_OF_TILE != i) continue;
    const Matrix& from = p.inputs[i];
    const int part = threadIdx.x % PARTS_OF_TILE;
    const int row = row0 + row_of(part), column = column0 + column_of(part);
    const float* source = from.scales + row / BLOCK * from.scale_pitch + column / BLOCK;
    const uint32_t to = shared_address(ring.scales[stage][i] + part);
    copy_async<4>(to, source, row < p.m && column < p.n ? 4 : 0);
  }
}

template <class Ring>
DEVICE void prepare(Ring& ring) {
  if (TMA && threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) barrier_init(shared_address(&ring.arrived[i]), 1);
    fence_barrier_init();
  }
  __syncthreads();
}

// Wait until a tile is there for all, and all are done with the one before it. `lap` counts how
// often the ring has gone round.
template <class Ring>
DEVICE void wait(Ring& ring, int stage, uint32_t lap) {
  copy_wait<STAGES - 2>();
  if (TMA) barrier_wait(shared_address(&ring.arrived[stage]), lap % 2);
  __syncthreads();
}
