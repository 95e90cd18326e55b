// Per-block INT8 GEMM for sm_90a: C (m×n) = A (m×k) · Bᵀ (n×k), a scale for each BLOCK×BLOCK tile,
// and for each OUT_BLOCK×OUT_BLOCK tile of C where that is written as codes.
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
// block costs one FMA; what 2^23 adds is taken off every window or two. The factors
// carry a power of two that makes up for 2^-149 and suits the largest scales of their rows; acc is
// freed of it at last.
#include "epilogue.cuh"
#include "hopper.cuh"
#include "ptx_sm80.cuh"

constexpr int PROMOTIONS = TILE_K / BLOCK;
constexpr int ITEMS = PROMOTIONS * ROWS;  // products of a slot, each promoted once
constexpr int ACCUMULATORS = TELESCOPED ? ROWS : 1;  // telescoped sums run on from block to block
constexpr int WINDOW = 512 / TILE_K;    // slots between two resets of telescoped sums
constexpr int CORRECTED = BLOCK < 128 ? 2 * WINDOW : WINDOW;  // and between two corrections
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
constexpr int LARGEST_AT = FACTORS_AT + ceil_div(STAGES * FACTOR_FLOATS, 4) * 16;
constexpr int AMAX_AT = LARGEST_AT + ceil_div(2 * TELESCOPED * (FACTOR_ROWS + FACTORS), 2) * 8;
constexpr int BARRIERS_AT = AMAX_AT + ceil_div(AMAX_WORDS, 2) * 8;
constexpr int SHARED_BYTES = BARRIERS_AT + 16 * STAGES;
static_assert(SHARED_BYTES == EXPECTED_SHARED_BYTES, "legal() counts shared memory otherwise");

using Slot = RingSlot<BARRIERS_AT>;
using Staging = StagingBuffers<STAGING>;

struct Arguments {
  TensorMap a, b, out, qt;
  const float *a_scale, *b_scale;
  Target to;
  int k;
  // For STREAM: a zero for each block and group, and room for the sums of a tile for each block.
  int* flags;
  float4* sums;
};

// A tile, and which of its steps of TILE_K along K.
struct Part {
  Tile tile;
  int first, steps;
};

// What a block (or its cluster) computes, in turn. With STREAM the steps of the last tiles, of one
// wave and of what whole waves leave, are dealt out evenly, in the order of the tiles: a tile's last
// steps are then the first of some block, its first steps the last of another. The tiles before them
// follow, each of one block. Steps are at least as many as blocks, so that each block is dealt some.
struct Parts {
  const Target& to;
  int down, across, steps, tile, first = 0;
  int whole;  // tiles that are not dealt out
  int left;   // of the block's share of steps
  DEVICE explicit Parts(const Arguments& x) : Parts(x.to, x.k) {}
  DEVICE Parts(const Target& to, int k)
      : to(to),
        down(ceil_div(to.m, TILE_M * CLUSTER_M)),
        across(ceil_div(to.n, TILE_N * CLUSTER_N)),
        steps(ceil_div(k, TILE_K)),
        tile(blockIdx.x / CLUSTER) {
    if (STREAM) {
      const int workers = gridDim.x / CLUSTER, waves = down * across / workers;
      whole = (waves * workers == down * across ? waves : max(waves - 1, 0)) * workers;
      const int64_t begin = dealt() * tile / workers;
      left = dealt() * (tile + 1) / workers - begin;
      if (left > 0) {
        tile = whole + int(begin / steps);
        first = begin % steps;
      }
    }
  }
  DEVICE int64_t dealt() const { return int64_t(down * across - whole) * steps; }
  DEVICE bool more() const { return STREAM ? left > 0 || tile < whole : tile < down * across; }
  DEVICE int count() const { return STREAM && left > 0 ? min(left, steps - first) : steps; }
  DEVICE void next() {
    if (STREAM && left > 0) {
      left -= count();
      tile = left > 0 ? tile + 1 : int(blockIdx.x) / CLUSTER;
    } else {
      tile += gridDim.x / CLUSTER;
    }
    first = 0;
  }
  // Blocks (or clusters) that follow and have the rest of the tile's steps.
  DEVICE int others() const {
    if (first + count() == steps) return 0;
    const int workers = gridDim.x / CLUSTER;
    const int last = (int64_t(tile - whole + 1) * steps * workers - 1) / dealt();
    return last - int(blockIdx.x) / CLUSTER;
  }
  DEVICE Part part(uint32_t rank) const {
    return {tile_at(tile, down, across, rank), first, count()};
  }
};

DEVICE float* factors(const Slot& slot) {
  return reinterpret_cast<float*>(shared + FACTORS_AT) + slot.index * FACTOR_FLOATS;
}

DEVICE int exponent(uint32_t bits) { return int(bits >> 23) - 127; }
DEVICE float power_of_two(int e) { return __int_as_float((e + 127) << 23); }

// Scales of A's blocks below each other, or of B's; null beyond the edge.
DEVICE const float* a_scales(const Arguments& x, int row) {
  return row < x.to.m ? x.a_scale + int64_t(row / BLOCK) * ceil_div(x.k, BLOCK) : nullptr;
}
DEVICE const float* b_scales(const Arguments& x, int column) {
  return column < x.to.n ? x.b_scale + int64_t(column / BLOCK) * ceil_div(x.k, BLOCK) : nullptr;
}

// The largest scale, as bits, of each factor row and then column of a tile. The scale warps share
// the work; all see all of it afterwards. As many loads at once as there are registers for: the
// next tile waits for them.
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
      const uint32_t bits = rows[i / 4] && at < blocks ? __float_as_uint(rows[i / 4][at]) : 0;
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

  DEVICE float product(int block, bool within) const {
    return within && a && b ? __fmul_rn(a[block], b[block]) : 0.0f;
  }

  // The factors of a slot that begins with `block`. Telescoped ones are differences of scales on a
  // grid of 2^104, the unit of GRID: then they are exact, and so is their sum.
  DEVICE void factors(float (&f)[PROMOTIONS + TELESCOPED], int block, int blocks, bool window_end) {
    constexpr float GRID = 0x1.8p127f;
#pragma unroll
    for (int p = 0; p < PROMOTIONS + TELESCOPED; ++p) {
      f[p] = product(block + p, block + p < blocks && !(p == PROMOTIONS && window_end));
      if (TELESCOPED) f[p] = __fmaf_rn(f[p] * lift, rest, GRID);
    }
    if (!TELESCOPED) return;
    const float all = f[0] - f[PROMOTIONS];
#pragma unroll
    for (int p = 0; p < PROMOTIONS; ++p) f[p] -= f[p + 1];
    f[PROMOTIONS] = -0x1p-126f * all;
  }
};

// Have the biases of a tile's columns at hand when its end asks for them: all groups do so at once,
// and wait for memory. Lines of 32, wherever they begin.
DEVICE void prefetch_bias(const Target& to, const Tile& tile) {
  const int ahead = threadIdx.x % 32 * 32;
  if (ahead < TILE_N + 31 && tile.column + ahead < to.n) prefetch(to.bias + tile.column + ahead);
}

// 2. One warp's share of the factors: of each slot, for each promotion and pair, the product of two
// scales or its difference from the next one. The warps take slots in turn: on one of the four
// schedulers alone the work would hold up its share of the multiplying.
DEVICE void scale(const Arguments& x, int warp) {
  constexpr int TURNS = ceil_div(FACTOR_ROWS * FACTORS, 32);
  const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int blocks = ceil_div(x.k, BLOCK), lane = threadIdx.x % 32;
  Slot slot;
  int whose = 0, parity = 0;
  for (Parts parts(x); parts.more(); parts.next(), parity ^= 1) {
    const Part part = parts.part(rank);
    uint32_t* largest =
        reinterpret_cast<uint32_t*>(shared + LARGEST_AT) + parity * (FACTOR_ROWS + FACTORS);
    if (BIAS && warp == 0) prefetch_bias(x.to, part.tile);
    if (TELESCOPED) find_largest(largest, x, part.tile, warp);
    Pair pairs[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; ++i) pairs[i].start(x, part.tile, i * 32 + lane, largest);
    for (int step = 0; step < part.steps; ++step, slot.next()) {
      const bool mine = whose == warp, last = step == part.steps - 1;
      const int block = (part.first + step) * PROMOTIONS;
      whose = whose == SCALE_WARPS - 1 ? 0 : whose + 1;
      if (!mine) continue;
      float f[TURNS][PROMOTIONS + TELESCOPED];
#pragma unroll
      for (int i = 0; i < TURNS; ++i) {
        pairs[i].factors(f[i], block, blocks, last || step % WINDOW == WINDOW - 1);
      }
      barrier_wait(slot.empty(), slot.parity ^ 1);
#pragma unroll
      for (int i = 0; i < TURNS; ++i) {
        if (pairs[i].to < 0) continue;
        float* to = factors(slot) + pairs[i].to;
#pragma unroll
        for (int p = 0; p < PROMOTIONS + TELESCOPED; ++p) to[p * FACTOR_TABLE] = f[i][p];
        if (TELESCOPED && last) to[(PROMOTIONS + 1) * FACTOR_TABLE] = pairs[i].sink;
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(slot.full());
    }
  }
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
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[TELESCOPED ? row : 0][i] = BASE;
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
#pragma unroll
    for (int i = 0; i < FACTORS; ++i) correction[row][i] = 0.0f;
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

  // 3. One slot.
  DEVICE void multiply(bool last) {
    barrier_wait(slot.full(), slot.parity);
    const Slot old = slot;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int row = item % ROWS, promotion = item / ROWS;
      turns.wait();
      issue(row, promotion);
      float factor[FACTORS], added[FACTORS];
      read_factors(factor, row, promotion);
      if (TELESCOPED && promotion == PROMOTIONS - 1) {
        read_factors(added, row, PROMOTIONS);
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
      multiply(step == steps);
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

// Of a row's addresses only the sixteen bytes differ by more than a constant: a group of eight rows
// further down lies a constant apart too, since the swizzle repeats there.
DEVICE void stage_codes(const uint16_t (&codes)[SUMS / 2], int panel, uint32_t buffer) {
  const uint32_t row = swizzled<Panel::BYTES>(buffer, lane_row(), lane_column());
#pragma unroll
  for (int j = 0; j < Panel::OCTETS; ++j) {
    const uint32_t at = (row ^ j / 2 << 4) + j % 2 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store_shared(at + 8 * half * Panel::BYTES, codes[2 * (panel * Panel::OCTETS + j) + half]);
    }
  }
}

DEVICE void stage_qt(const uint16_t (&codes)[SUMS / 2], uint32_t buffer) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    store_shared(swizzled<64>(buffer, column_of(i), row_of(i)), uint8_t(codes[i / 2] >> i % 2 * 8));
  }
}

// With STREAM, where sums of parts that do not begin their tile lie until the block that begins it
// adds them to its own. Only a block's first part can be one of those. So a block has room for one
// tile, in the order of the registers, and for each group a flag that says that its sums are there.
// The one reader adds in the order of the blocks, so that the bits are the same each time, and clears
// the flags for the next launch. What it waits for waits for nothing: there is no deadlock.
struct Leftovers {
  static constexpr int QUADS = SUMS / 4;
  int* flag;
  float4* mine;
  bool leader;
  DEVICE Leftovers(const Arguments& x, int group)
      : flag(x.flags + blockIdx.x * GROUPS + group),
        mine(x.sums + int64_t(blockIdx.x * GROUPS + group) * ROWS * QUADS * 128 + threadIdx.x % 128),
        leader(threadIdx.x % 128 == 0) {}
  DEVICE void meet() const { named_barrier(GROUP_BARRIERS + threadIdx.x / 128, 128); }

  DEVICE void leave(const float (&acc)[ROWS][SUMS]) const {
#pragma unroll
    for (int i = 0; i < ROWS * QUADS; ++i) {
      const float* sum = &acc[i / QUADS][i % QUADS * 4];
      __stcg(mine + i * 128, make_float4(sum[0], sum[1], sum[2], sum[3]));
    }
    meet();
    if (leader) store_release(flag, 1);
  }

  // Of the `others` blocks (or those of the clusters) that follow.
  DEVICE void add(float (&acc)[ROWS][SUMS], int others) const {
    if (others == 0) return;
    for (int i = 1; leader && i <= others; ++i) {
      int* const theirs = flag + i * CLUSTER * GROUPS;
      while (load_acquire(theirs) == 0) {}
      *theirs = 0;
    }
    meet();
#pragma unroll 1
    for (int i = 1; i <= others; ++i) {
      const float4* const theirs = mine + int64_t(i) * CLUSTER * GROUPS * ROWS * QUADS * 128;
#pragma unroll
      for (int j = 0; j < ROWS * QUADS; ++j) {
        const float4 sum = __ldcg(theirs + j * 128);
        float* const to = &acc[j / QUADS][j % QUADS * 4];
        to[0] = __fadd_rn(to[0], sum.x);
        to[1] = __fadd_rn(to[1], sum.y);
        to[2] = __fadd_rn(to[2], sum.z);
        to[3] = __fadd_rn(to[3], sum.w);
      }
    }
  }
};

// 4. Floats of 64 rows on their way to memory.
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

// Where a warp leaves the largest |x| of its 16 rows of each of a tile's blocks. Two `turn`s, so that
// the next tile's words do not overwrite what another warp has still to read.
DEVICE uint32_t* amax_of(int turn, int part, int warp) {
  return reinterpret_cast<uint32_t*>(shared + AMAX_AT) +
         ((turn * GROUPS * ROWS + part) * 4 + warp) * AMAX_BLOCKS;
}

// Leave the largest |x| of the group's rows, and meet the other warps that share blocks: one has 16
// rows of a block, so that two have all of one of 32 rows, a group of one of 64, and of 128 rows a
// group of two ROWS or two groups.
DEVICE void leave_amax(float (&acc)[ROWS][SUMS], const Arguments& x, int group, int turn,
                       const Tile& tile) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int part = group * ROWS + r;
    uint32_t amax[AMAX_BLOCKS];
    warp_amax(acc[r], amax, x.to, tile.row + 64 * part, tile.column);
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int b = 0; b < AMAX_BLOCKS; ++b) {
        amax_of(turn, part, threadIdx.x / 32 % 4)[b] = amax[b];
      }
    }
  }
  constexpr int SHARING = OUT_BLOCK == 128 && ROWS == 1 ? 2 : 1;  // groups that share blocks
  named_barrier(SHARING == 2 ? PAIR_BARRIERS + group / 2 : GROUP_BARRIERS + group, 128 * SHARING);
}

// The largest |x| of a block that the warp's rows lie in.
DEVICE uint32_t block_amax(int turn, int part, int block) {
  const int warp = threadIdx.x / 32 % 4;
  if (OUT_BLOCK == 32) {
    return max(amax_of(turn, part, warp & 2)[block], amax_of(turn, part, warp | 1)[block]);
  }
  constexpr int PARTS = OUT_BLOCK == 128 ? 2 : 1;
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 4 * PARTS; ++i) {
    most = max(most, amax_of(turn, part / PARTS * PARTS + i / 4, i % 4)[block]);
  }
  return most;
}

// Each lane divides for one block, tells the others what to multiply by and writes the scale.
// Returns a bit for each block whose products may exceed 127.
DEVICE uint32_t scale_blocks(float (&multiplier)[AMAX_BLOCKS], const Arguments& x, int turn,
                             int part, const Tile& tile) {
  const int lane = threadIdx.x % 32, row = tile.row + 64 * part + threadIdx.x / 32 % 4 * 16;
  const int block = lane < AMAX_BLOCKS ? lane : 0;
  const uint32_t amax = block_amax(turn, part, block);
  float scale, own;
  block_scale(amax, scale, own);
#pragma unroll
  for (int b = 0; b < AMAX_BLOCKS; ++b) multiplier[b] = __shfl_sync(0xFFFFFFFFu, own, b);
  const uint32_t over = STOCHASTIC ? __ballot_sync(0xFFFFFFFFu, exceeds(amax, own)) : 0;
  if (lane < AMAX_BLOCKS && row % OUT_BLOCK == 0) {
    store_scale(scale, x.to, row, tile.column + block * OUT_BLOCK);
  }
  return over;
}

// Draws as `Draw` does, by way of shared memory, the 512 bytes of the warp's own at `scratch`: each
// lane writes the words of a row, and ldmatrix deals them out as the sums lie. Eight instructions
// for what takes 32 by shuffles.
struct StagedDraw {
  uint64_t seed;
  int row0;
  uint32_t scratch;

  DEVICE void operator()(Words (&bits)[2], int group0) const {
    const int lane = threadIdx.x % 32, row = row0 + threadIdx.x / 32 % 4 * 16 + lane % 8;
    const uint32_t at = scratch + 16 * lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store_shared(at, philox(seed, group0 + lane / 8, row + 8 * half).w);
      __syncwarp();
      load_matrices(bits[half].w, at);  // waits for all lanes before any goes on to write again
    }
  }
};

DEVICE void finish_codes(float (&acc)[ROWS][SUMS], const Arguments& x, Staging& staging,
                         int group, int turn, const Tile& tile) {
  staging.wait();  // and the others know from the barrier where the largest |x| meet
  const uint64_t seed = STOCHASTIC ? *x.to.seed : 0;
  leave_amax(acc, x, group, turn, tile);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = tile.row + 64 * (group * ROWS + r);
    float multiplier[AMAX_BLOCKS];
    const uint32_t over = scale_blocks(multiplier, x, turn, group * ROWS + r, tile);
    multiply_blocks(acc[r], multiplier, over);
    uint16_t codes[SUMS / 2];
    if constexpr (Q && TMA_OUT) {
      const uint32_t buffer = r == 0 ? staging.buffer() : staging.take();
      const uint32_t own = buffer + threadIdx.x / 32 % 4 * 16 * Panel::BYTES;  // rows of the warp
      to_codes(acc[r], codes, StagedDraw{seed, row, own}, tile.column);
#pragma unroll
      for (int panel = 0; panel < Panel::COUNT; ++panel) {
        stage_codes(codes, panel, panel == 0 ? buffer : staging.take());
        staging.give(x.out, tile.column + panel * PANEL_COLUMNS, row);
      }
    } else {
      to_codes(acc[r], codes, Draw{seed, row}, tile.column);
      if constexpr (Q) store_codes_direct(codes, x.to, row, tile.column);
    }
    if constexpr (QT && TMA_QT) {
      const bool first = r == 0 && !(Q && TMA_OUT);
      stage_qt(codes, first ? staging.buffer() : staging.take());
      staging.give(x.qt, row, tile.column);
    } else if constexpr (QT) {
      store_qt_direct(codes, x.to, row, tile.column);
    }
  }
}

DEVICE void consume(const Arguments& x, int group) {
  const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
  Multiplier multiplier(group, rank);
  Staging staging(group);
  int turn = 0;
  for (Parts parts(x); parts.more(); parts.next(), turn ^= 1) {
    const Part part = parts.part(rank);
    multiplier.tile(part.steps);
    if constexpr (STREAM) {
      const Leftovers leftovers(x, group);
      if (part.first > 0) {
        leftovers.leave(multiplier.acc);
        continue;
      }
      leftovers.add(multiplier.acc, parts.others());
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) add_bias(multiplier.acc[r], x.to, part.tile.column);
    if constexpr (OUTPUT == INT8) {
      finish_codes(multiplier.acc, x, staging, group, turn, part.tile);
    } else {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int row = part.tile.row + 64 * (group * ROWS + r);
        finish_floats(multiplier.acc[r], x, staging, row, part.tile.column);
      }
    }
  }
  multiplier.turns.end(group);
  if (staging.leader) tma_wait_read<0>();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(128 * (GROUPS + 1), 1)
    gemm(const __grid_constant__ Arguments x) {
  // The same in all lanes, and shown to be, so that it lives in a uniform register.
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) start_barriers<Slot>(2);
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();
  if (group == GROUPS) {
    give_registers<PRODUCER_REGISTERS>();
    if (warp == 0 && lane == 0) load<Slot, Parts>(x);
    if (warp > 0) scale(x, warp - 1);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(x, group);
  }
  // A block's shared memory must outlast what its neighbours still send and signal.
  if (CLUSTER > 1) cluster_sync();
}
