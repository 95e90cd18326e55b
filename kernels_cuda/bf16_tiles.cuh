// Numbers of bf16 to blocks of INT8 codes, in tiles of 128×128: of one matrix, or of MATRICES that
// stand side by side.
//
// Blocks of the grid go over tiles, one turn each, while the next tiles are on their way to shared
// memory, in two boxes of 64 columns each. A warp keeps its parts as they are, in pairs, until the
// largest of their block is known.
#pragma once

#include "tile_codes.cuh"

struct Arguments {
  TensorMap maps[MATRICES];          // in boxes of half a tile; if TMA
  const uint16_t* inputs[MATRICES];  // in their order, each m×width
  int64_t pitches[MATRICES];         // elements from row to row
  const uint64_t* seed;
  uint8_t* q;
  float* scale;
  uint8_t* qt;
  float* scale_t;
  int32_t m, n, width;
};

struct Shared {
  uint16_t numbers[STAGES][BOXES][TILE * BOX];
  uint32_t most[PARTS_OF_TILE];  // the bits of parts' largest values
  uint64_t arrived[STAGES];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "as the host counts them");

// Have a tile's numbers come, zeros beyond the matrix. No tile lies in two of several matrices.
DEVICE void fetch(Shared& shared, int stage, const Place& place, const Arguments& p) {
  const int row0 = place.row * TILE, whole = place.column * TILE;
  const int which = MATRICES == 1 ? 0 : whole / p.width, column0 = whole - which * p.width;
  auto& numbers = shared.numbers[stage];
  if constexpr (!TMA) {
    copy_pairs<TILE, THREADS>(numbers, p.inputs[which], p.pitches[which], row0, column0, p.m,
                              p.width, threadIdx.x);
  }
  if (TMA && threadIdx.x == 0) {
    const uint32_t arrived = shared_address(&shared.arrived[stage]);
    barrier_expect(arrived, sizeof(numbers));
#pragma unroll
    for (int i = 0; i < BOXES; ++i) {
      tma_load(shared_address(numbers[i]), p.maps[which], column0 + i * BOX, row0, arrived);
    }
  }
}

DEVICE void turn(Shared& shared, int stage, const Place& place, uint64_t seed, const Arguments& p,
                 const PairLane& lane) {
#pragma unroll 1
  for (int begin = 0; begin < PARTS; begin += HELD) {
    const int part = lane.warp * PARTS + begin;
    Pairs held[HELD];
    uint32_t most[HELD];
#pragma unroll
    for (int b = 0; b < HELD; ++b) {
#pragma unroll
      for (int k = 0; k < TALL; ++k) {
        const auto [x, y, z, w] = *lane.pairs<TILE>(shared.numbers[stage], part + b, k);
        held[b].pairs[k][0] = x, held[b].pairs[k][1] = y;
        held[b].pairs[k][2] = z, held[b].pairs[k][3] = w;
      }
      most[b] = __reduce_max_sync(ALL, held[b].largest());
    }
    const int row = place.row * TILE + row_of(part), column = place.column * TILE + column_of(part);
    store_parts<true>(held, most, shared.most, part, row, column, seed, p, lane);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    tiles(const __grid_constant__ Arguments p) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const PairLane lane;
  const uint64_t seed = STOCHASTIC ? *p.seed : 0;
  const int down = ceil_div(p.m, TILE), across = ceil_div(p.n, TILE);
  const Place step(gridDim.x, across);
  Place place(blockIdx.x, across), ahead = place;
  prepare(shared);
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i, ahead.advance(step, across)) {
    if (ahead.row < down) fetch(shared, i, ahead, p);
  }
  int stage = 0;
  uint32_t lap = 0;  // around the stages
#pragma unroll 1
  for (; place.row < down; place.advance(step, across), ahead.advance(step, across)) {
    wait(shared, stage, lap);
    if (ahead.row < down) fetch(shared, stage ? stage - 1 : STAGES - 1, ahead, p);
    turn(shared, stage, place, seed, p, lane);
    if (++stage == STAGES) stage = 0, ++lap;
  }
}
