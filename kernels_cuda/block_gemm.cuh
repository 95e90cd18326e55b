// The per-block INT8 GEMM for sm_90a: what its kernels do alike, whatever steps along K they walk.
//
// One persistent block an SM walks over tiles of TILE_M×TILE_N. Its warps have three roles, the
// last of which does two things; they meet at the full and empty barriers of a ring of STAGES slots,
// each 128 of K deep. The code of the ring, its loading and the staging buffers is in hopper.cuh.
//
//   1. load:     one thread fetches A and B by TMA, each block of a cluster its share of what the
//                cluster has in common, for all of it.
//   2. scale:    three warps multiply the scales of A's and B's blocks, so that the
//                multipliers' inner loop reads its factors ready-made.
//   3. multiply: GROUPS warp groups each keep ROWS times 64×TILE_N. Per BLOCK of K: int32 sums on
//                the tensor cores, then promoted into fp32. While one group promotes, another
//                multiplies.
//   4. finish:   each group writes its own rows by TMA, from a staging buffer, and goes on with
//                the next tile while the copy engine works. Groups wait for each other only where
//                two share blocks of codes, and to take turns (IN_FLIGHT).
//
// Schedules. Exact: acc += (sA·sB)·float(S) with the sums S from zero, one rounding a block, as
// the reference rounds. Telescoped: no conversion and few resets. The floats of bits 0…2^24 are
// multiples of 2^-149 (the subnormal ones and the first binade), so that a sum that starts at 2^23
// is, read as a float, (2^23 + S)·2^-149 for as long as |S| < 2^23: over a window of 512 of K. By
// summation by parts Σ s_b·(S_b − S_{b−1}) = Σ (s_b − s_{b+1})·S_b with s_{n+1} = 0, so that a
// block costs one FMA; what 2^23 adds is taken off every second window. The factors carry a power of
// two that makes up for 2^-149 and suits the largest scales of their rows; acc is freed of it at last.
#pragma once

#include "block_epilogue.cuh"
#include "hopper.cuh"
#include "ptx_sm80.cuh"

#ifndef MARKED
#define MARKED 0  // a tile's last slot is marked: who multiplies does not know how many there are
#endif

constexpr int PROMOTIONS = TILE_K / BLOCK;
constexpr int ITEMS = PROMOTIONS * ROWS;  // products of a slot, each promoted once
constexpr int ACCUMULATORS = TELESCOPED ? ROWS : 1;  // telescoped sums run on from block to block
constexpr int WINDOW = 512 / TILE_K;    // slots between two resets of telescoped sums
constexpr int CORRECTED = 2 * WINDOW;  // and between two corrections
constexpr int BASE = 1 << 23;

// Rows and columns of a tile that have one scale wherever the tile lies.
constexpr int SCALE_ROWS = BLOCK < 64 ? BLOCK : 64;
constexpr int SCALE_COLUMNS = BLOCK >= 128 && TILE_N % 128 == 0 ? 128
                              : BLOCK >= 64 && TILE_N % 64 == 0 ? 64 : 32;
constexpr int FACTOR_ROWS = TILE_M / SCALE_ROWS, FACTORS = TILE_N / SCALE_COLUMNS;
constexpr int FACTOR_PITCH = FACTORS > 2 ? ceil_div(FACTORS, 4) * 4 : FACTORS;
// Of a slot: a table for each promotion and, if telescoped, of what the base adds and of the power
// of two that is left.
constexpr int FACTOR_TABLE = FACTOR_ROWS * FACTOR_PITCH;
constexpr int FACTOR_FLOATS = (PROMOTIONS + 2 * TELESCOPED) * FACTOR_TABLE;
constexpr int SCALE_WARPS = 3;
constexpr int PAIRS = ceil_div(FACTOR_ROWS * FACTORS, 32);  // of scales, each lane's of a slot
// Two of them at one slot would be two rounds apart, which a barrier's parity cannot tell.
static_assert(STAGES >= SCALE_WARPS);

// Named barriers beside the groups': one a pair of groups, one of the scale warps, two a group.
constexpr int PAIR_BARRIERS = 5, SCALE_BARRIER = 7, TURN_BARRIERS = 8;

using Panel = Panels<ELEMENT_BYTES>;
constexpr int PANEL_COLUMNS = Panel::COLUMNS;
constexpr int STAGING = QT && TILE_N > 128 ? 64 * TILE_N : 8192;

constexpr int AMAX_BLOCKS = TILE_N / OUT_BLOCK > 0 ? TILE_N / OUT_BLOCK : 1;
constexpr int AMAX_WORDS = OUTPUT == INT8 ? 2 * GROUPS * ROWS * 4 * AMAX_BLOCKS : 0;

// Shared memory after the staging buffers, in order.
constexpr int FACTORS_AT = STAGING_AT + GROUPS * BUFFERS * STAGING;
constexpr int BASES_AT = FACTORS_AT + ceil_div(STAGES * FACTOR_FLOATS, 4) * 16;
constexpr int LARGEST_AT = BASES_AT + 16 * TELESCOPED;
constexpr int AMAX_AT = LARGEST_AT + ceil_div(2 * TELESCOPED * (FACTOR_ROWS + FACTORS), 2) * 8;
constexpr int MARKS_AT = AMAX_AT + ceil_div(AMAX_WORDS, 2) * 8;
constexpr int BARRIERS_AT = MARKS_AT + ceil_div(MARKED * STAGES, 2) * 8;
constexpr int SHARED_BYTES = BARRIERS_AT + 16 * STAGES;
static_assert(SHARED_BYTES == EXPECTED_SHARED_BYTES, "legal() counts shared memory otherwise");

using Slot = RingSlot<BARRIERS_AT>;
using Staging = StagingBuffers<STAGING>;

// By one thread, before the block's first __syncthreads.
DEVICE void start() {
  start_barriers<Slot>(2);
  if (TELESCOPED) store_shared(shared_at(BASES_AT), {BASE, BASE, BASE, BASE});
}

DEVICE float* factors(const Slot& slot) {
  return reinterpret_cast<float*>(shared + FACTORS_AT) + slot.index * FACTOR_FLOATS;
}

// Whether a slot is its tile's last, if MARKED.
DEVICE int& mark(const Slot& slot) {
  return reinterpret_cast<int*>(shared + MARKS_AT)[slot.index];
}

DEVICE int exponent(uint32_t bits) { return int(bits >> 23) - 127; }
DEVICE float power_of_two(int e) { return __int_as_float((e + 127) << 23); }

// Scales of A's blocks below each other, or of B's; null beyond the edge.
template <class Arguments>
DEVICE const float* a_scales(const Arguments& x, int row) {
  return row < x.to.m ? x.a_scale + int64_t(row / BLOCK) * ceil_div(x.k, BLOCK) : nullptr;
}
template <class Arguments>
DEVICE const float* b_scales(const Arguments& x, int column) {
  return column < x.to.n ? x.b_scale + int64_t(column / BLOCK) * ceil_div(x.k, BLOCK) : nullptr;
}

// The bits of a block's scale, of A or of B; where there are more of it than these, overloaded.
template <class Arguments>
DEVICE uint32_t scale_bits(const Arguments& x, const float* scales, int block, bool of_a) {
  return __float_as_uint(scales[block]);
}

// The largest scale, as bits, of each factor row and then column of a tile. The scale warps share
// the work; all see all of it afterwards. As many loads at once as there are registers for: the
// next tile waits for them.
template <class Arguments>
DEVICE void find_largest(uint32_t* largest, const Arguments& x, const Tile& tile, int warp) {
  constexpr int ALL = FACTOR_ROWS + FACTORS, EACH = ceil_div(ALL, SCALE_WARPS);
  const int blocks = ceil_div(x.k, BLOCK), lane = threadIdx.x % 32;
  const float* rows[EACH];
  uint32_t most[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = warp * EACH + i;
    rows[i] = at < FACTOR_ROWS ? a_scales(x, tile.row + at * SCALE_ROWS)
              : at < ALL ? b_scales(x, tile.column + (at - FACTOR_ROWS) * SCALE_COLUMNS) : nullptr;
    most[i] = 0;
  }
  for (int block = lane; block < blocks; block += 128) {
#pragma unroll
    for (int i = 0; i < 4 * EACH; ++i) {
      const int at = block + i % 4 * 32;
      const bool of_a = warp * EACH + i / 4 < FACTOR_ROWS;
      const uint32_t bits =
          rows[i / 4] && at < blocks ? scale_bits(x, rows[i / 4], at, of_a) : 0;
      most[i / 4] = max(most[i / 4], bits);
    }
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    most[i] = __reduce_max_sync(0xFFFFFFFFu, most[i]);
    if (lane == 0 && warp * EACH + i < ALL) largest[warp * EACH + i] = most[i];
  }
  named_barrier(SCALE_BARRIER, 32 * SCALE_WARPS);
}

// What a lane of a scale warp does for one pair of a row of A's blocks and one of B's.
struct Pair {
  const float *a = nullptr, *b = nullptr;
  float lift, rest, sink;  // 2^shift in two parts, and what makes up for it and for 2^-149
  int to;                  // in a table; negative for no pair

  template <class Arguments>
  DEVICE void start(const Arguments& x, const Tile& tile, int pair, const uint32_t* largest) {
    const int row = pair / FACTORS, column = pair % FACTORS;
    to = pair < FACTOR_ROWS * FACTORS ? row * FACTOR_PITCH + column : -1;
    a = to < 0 ? nullptr : a_scales(x, tile.row + row * SCALE_ROWS);
    b = to < 0 ? nullptr : b_scales(x, tile.column + column * SCALE_COLUMNS);
    if (TELESCOPED && to >= 0) {
      // As large as keeps the factors below 2^126. Products of scales above 2^104 overflow.
      const int most = exponent(largest[row]) + exponent(largest[FACTOR_ROWS + column]);
      const int shift = max(22, min(124 - most, 250));
      lift = power_of_two(shift / 2);
      rest = power_of_two(shift - shift / 2);
      sink = power_of_two(149 - shift);
    }
  }

  // Telescoped factors are differences of scales on a grid of 2^104: then they are exact, and so is
  // their sum.
  static constexpr float GRID = TELESCOPED ? 0x1.8p127f : 0.0f;  // added to round to it
  DEVICE float on_grid(float x) const { return TELESCOPED ? __fmaf_rn(x * lift, rest, GRID) : x; }

  // From the scales of a slot's blocks, and of the one that follows, to its factors. `firsts`, where a
  // correction is due, is what the factors since the last one add up to, which is for each window
  // its first block's scale; else 0.
  DEVICE static void differ(float (&f)[PROMOTIONS + TELESCOPED], float firsts) {
    if (!TELESCOPED) return;
#pragma unroll
    for (int p = 0; p < PROMOTIONS; ++p) f[p] -= f[p + 1];
    f[PROMOTIONS] = -0x1p-126f * firsts;
  }
};

// Have the biases of a tile's columns at hand when its end asks for them: all groups do so at once,
// and wait for memory. Lines of 32, wherever they begin.
DEVICE void prefetch_bias(const Target& to, const Tile& tile) {
  const int ahead = threadIdx.x % 32 * 32;
  if (ahead < TILE_N + 31 && tile.column + ahead < to.n) prefetch(to.bias + tile.column + ahead);
}

// Write a slot's factors, the end of a warp's work on it.
DEVICE void give_factors(const Slot& slot, const Pair (&pairs)[PAIRS],
                         const float (&f)[PAIRS][PROMOTIONS + TELESCOPED], bool last) {
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    if (pairs[i].to < 0) continue;
    float* to = factors(slot) + pairs[i].to;
#pragma unroll
    for (int p = 0; p < PROMOTIONS + TELESCOPED; ++p) to[p * FACTOR_TABLE] = f[i][p];
    if (TELESCOPED && last) to[(PROMOTIONS + 1) * FACTOR_TABLE] = pairs[i].sink;
  }
  if (MARKED && threadIdx.x % 32 == 0) mark(slot) = last;
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(slot.full());
}

// Whose turn it is on the tensor cores. Left alone they take instructions from all groups in turn,
// so that all finish, and then all promote, at the same time. So at most IN_FLIGHT groups multiply
// at once: a group's product may start when the one IN_FLIGHT before it is done. Two barriers a
// group, used alternately, because its predecessor may be done again before it has noticed.
struct Turns {
  int mine, next;  // barriers

  DEVICE Turns(int group) {
    const int after = group + IN_FLIGHT;
    mine = TURN_BARRIERS + 2 * group;
    next = TURN_BARRIERS + 2 * (after % GROUPS);
    if (after >= GROUPS) pass();
  }
  DEVICE void wait() {
    if (!IN_FLIGHT) return;
    named_barrier(mine, 256);
    mine ^= 1;
  }
  DEVICE void pass() {
    if (!IN_FLIGHT) return;
    named_arrive(next, 256);
    next ^= 1;
  }
  // The last product of the last groups has nobody to start.
  DEVICE void end(int group) {
    if (group < IN_FLIGHT) wait();
  }
};

// By loads of four: beside products a scheduler issues one instruction in three cycles,
// whatever it does.
DEVICE void start_at_base(int (&sums)[SUMS]) {
#pragma unroll
  for (int i = 0; i < SUMS; i += 4) {
    const uint4 base = load_shared_anew(shared_at(BASES_AT));
    sums[i] = base.x;
    sums[i + 1] = base.y;
    sums[i + 2] = base.z;
    sums[i + 3] = base.w;
  }
}

// The sums of one group: int32 ones on their way through a block, or a window, of K, and fp32 ones.
struct Multiplier {
  float acc[ROWS][SUMS];
  int sums[ACCUMULATORS][SUMS];
  float correction[ROWS][FACTORS], sink[ROWS][FACTORS];
  int group;
  uint32_t rank;
  Slot slot;
  uint32_t a, b;           // the slot's operands, as descriptors have them
  const float* factor_at;  // and its factors
  Turns turns;

  DEVICE Multiplier(int group, uint32_t rank) : group(group), rank(rank), turns(group) { enter(); }

  // Done a slot ahead: the tensor cores would wait for it.
  DEVICE void enter() {
    const int row = group * ROWS * (64 / SCALE_ROWS) + (BLOCK < 64 ? threadIdx.x / 64 % 2 : 0);
    a = wgmma_address(slot.a() + group * ROWS * 64 * TILE_K);
    b = wgmma_address(slot.b());
    factor_at = factors(slot) + row * FACTOR_PITCH;
  }

  DEVICE void reset(int row) {
    if (TELESCOPED) {
      start_at_base(sums[row]);
    } else {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) sums[0][i] = 0;
    }
  }

  // Have the tensor cores multiply one block of K of 64 rows.
  DEVICE void issue(int row, int promotion) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK / 32; ++i) {
      const int at = 2 * (promotion * (BLOCK / 32) + i);  // 32 of K, in units of 16 bytes
      wgmma(sums[TELESCOPED ? row : 0], wgmma_descriptor(a + at + row * (64 * TILE_K / 16)),
            wgmma_descriptor(b + at), TELESCOPED || i > 0);
    }
    wgmma_commit();
  }

  DEVICE void read_factors(float (&to)[FACTORS], int row, int table) const {
    const int at = table * FACTOR_TABLE + row * (64 / SCALE_ROWS) * FACTOR_PITCH;
#pragma unroll
    for (int i = 0; i < FACTORS; ++i) to[i] = factor_at[at + i];
  }

  DEVICE void promote(int row, const float (&factor)[FACTORS]) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
      const int sum = sums[TELESCOPED ? row : 0][i];
      acc[row][i] = __fmaf_rn(factor[i / 4 * 8 / SCALE_COLUMNS],
                              TELESCOPED ? __int_as_float(sum) : __int2float_rn(sum), acc[row][i]);
    }
  }

  // Take off what the base has added.
  DEVICE void correct(int row) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) acc[row][i] += correction[row][i / 4 * 8 / SCALE_COLUMNS];
  }

  // The same for the last time, and out of the factors' power of two.
  DEVICE void sink_to_scale(int row) {
#pragma unroll
    for (int i = 0; i < FACTORS; ++i) correction[row][i] *= sink[row][i];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
      const int at = i / 4 * 8 / SCALE_COLUMNS;
      acc[row][i] = __fmaf_rn(acc[row][i], sink[row][at], correction[row][at]);
    }
  }

  // 3. One slot. Returns whether it is the tile's last.
  DEVICE bool multiply(bool last) {
    barrier_wait(slot.full(), slot.parity);
    const Slot old = slot;
    if (MARKED) last = mark(old);
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int row = item % ROWS, promotion = item / ROWS;
      turns.wait();
      issue(row, promotion);
      float factor[FACTORS];
      read_factors(factor, row, promotion);
      if (TELESCOPED && promotion == PROMOTIONS - 1) {
        read_factors(correction[row], row, PROMOTIONS);  // of use where it is due alone
        if (last) read_factors(sink[row], row, PROMOTIONS + 1);
      }
      wgmma_wait<0>();
      turns.pass();
      if (IN_FLIGHT) wgmma_wait<0>();  // or ptxas passes the turn on after the promotion
      if (item == ITEMS - 1) {
        old.release(rank);
        slot.next();
        enter();
      }
      promote(row, factor);
    }
    return last;
  }

  // A tile, of so many steps or, if MARKED, of all up to the mark.
  DEVICE void tile(int steps = 0x7FFFFFFF) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) acc[row][i] = 0.0f;
      reset(row);
    }
    for (int step = 1; step <= steps; ++step) {
      const bool last = multiply(step == steps);
      if (MARKED && last) steps = step;
      if (!TELESCOPED || (step % WINDOW && step < steps)) continue;
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        if (step == steps) {
          sink_to_scale(row);
        } else {
          reset(row);
          if (step % CORRECTED == 0) correct(row);
        }
      }
    }
  }
};

DEVICE void stage_floats(const float (&acc)[SUMS], int panel, uint32_t buffer) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < Panel::OCTETS; j += OUTPUT == FP32 ? 1 : 2) {
    const int i = 4 * (panel * Panel::OCTETS + j);
    if constexpr (OUTPUT == FP32) {
      const int byte = 4 * (8 * j + lane_column());
      store_shared(swizzled<Panel::BYTES>(buffer, lane_row(), byte), acc[i], acc[i + 1]);
      store_shared(swizzled<Panel::BYTES>(buffer, lane_row() + 8, byte), acc[i + 2], acc[i + 3]);
    } else {
      const int row = threadIdx.x / 32 % 4 * 16 + lane % 16, byte = 16 * (j + lane / 16);
      store_matrices(swizzled<Panel::BYTES>(buffer, row, byte), pack(acc[i], acc[i + 1]),
                     pack(acc[i + 2], acc[i + 3]), pack(acc[i + 4], acc[i + 5]),
                     pack(acc[i + 6], acc[i + 7]));
    }
  }
}

// 4. Floats of 64 rows on their way to memory.
template <class Arguments>
DEVICE void finish_floats(float (&acc)[SUMS], const Arguments& x, Staging& staging, int row,
                          int column) {
  constexpr bool ADD = ACCUMULATE && OUTPUT == FP32 && TMA_OUT;
  if (ACCUMULATE && !ADD) add_held(acc, x.to, row, column);
#pragma unroll
  for (int panel = 0; panel < Panel::COUNT; ++panel) {
    const uint32_t buffer = staging.take();
    stage_floats(acc, panel, buffer);
    if constexpr (TMA_OUT) {
      staging.give<ADD>(x.out, column + panel * PANEL_COLUMNS, row);
    } else {
      named_barrier(staging.barrier, 128);
      store_panel<ELEMENT_BYTES>(buffer, x.to, row, column + panel * PANEL_COLUMNS);
    }
  }
}
