// Per-block INT8 GEMM for sm_90a: C (m×n) = A (m×k) · Bᵀ (n×k), a scale for each BLOCK×BLOCK tile,
// and for each OUT_BLOCK×OUT_BLOCK tile of C where that is written as codes.
//
// What it shares with others by blocks, first of all how they work, is in block_gemm.cuh. Here are
// the order of tiles and of steps along K, sums that blocks leave each other (STREAM), and codes.
#include "interleaved.cuh"
#include "launches.cuh"

struct Arguments {
  TensorMap a, b, out, qt;
  const float *a_scale, *b_scale;
  Target to;
  int k;
  // For STREAM: a zero for each block and group, and room for the sums of a tile for each block.
  int* flags;
  float4* sums;
  float* squares;  // with SQUARES
  int border;      // the first row that is BELOW
};

// The rows that a launch computes. Clusters of more than two do not fill the device: where they
// compute those ABOVE the border, a second launch, in clusters of two, computes those BELOW it
// beside the first, on the multiprocessors that are left over.
enum Band { EVERY_ROW, ABOVE, BELOW };

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
  int border = 0;
  DEVICE explicit Parts(const Arguments& x) : Parts(x.to, x.k) {
    if (BAND == ABOVE) down = ceil_div(x.border, TILE_M * CLUSTER_M);
    if (BAND == BELOW) {
      border = x.border;
      down = ceil_div(to.m - border, TILE_M * CLUSTER_M);
    }
  }
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
    Tile at = tile_at(tile, down, across, rank);
    if (BAND == BELOW) at.row += border;
    return {at, first, count()};
  }
};

DEVICE float scale_of(const Pair& pair, int block, int blocks) {
  const bool within = block < blocks && pair.a && pair.b;
  return pair.on_grid(within ? __fmul_rn(pair.a[block], pair.b[block]) : 0.0f);
}

// The scales of the first blocks of windows since the last correction, added up. Not unrolled: that
// takes a register more than a scale warp has.
DEVICE float firsts_of(const Pair& pair, const Part& part, int step, int blocks) {
  constexpr int NEXT = CHAINS > 1 ? 1 : WINDOW;
  const int first = step / CORRECTED * CORRECTED, last = min(step, first + NEXT);
  float sum = 0.0f;
#pragma unroll 1
  for (int at = first; at <= last; at += NEXT) {
    sum += scale_of(pair, (part.first + at) * PROMOTIONS, blocks) - Pair::GRID;
  }
  return sum;
}

// Whether a step of a part is the last of its chain in a window: its factor is then the scale alone.
DEVICE constexpr bool ends_window(int step, int steps) {
  return step >= steps - CHAINS || step % (CHAINS * WINDOW) >= CHAINS * (WINDOW - 1);
}

// The factors of a slot.
DEVICE void factors_of(const Pair& pair, float (&f)[PROMOTIONS + TELESCOPED], const Part& part,
                       int step, int blocks) {
  const int block = (part.first + step) * PROMOTIONS;
  const bool last = step == part.steps - 1, window_end = ends_window(step, part.steps);
#pragma unroll
  for (int p = 0; p < PROMOTIONS + TELESCOPED; ++p) {
    const bool none = p == PROMOTIONS && window_end;
    f[p] = none ? Pair::GRID : scale_of(pair, block + p * CHAINS, blocks);
  }
  const bool corrected = TELESCOPED && (last || step % CORRECTED == CORRECTED - 1);
  Pair::differ(f, corrected ? firsts_of(pair, part, step, blocks) : 0.0f);
}

// 2. One warp's share of the factors: of each slot, for each promotion and pair, the product of two
// scales or its difference from the next one. The warps take slots in turn: on one of the four
// schedulers alone the work would hold up its share of the multiplying.
DEVICE void scale(const Arguments& x, int warp) {
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
    Pair pairs[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) pairs[i].start(x, part.tile, i * 32 + lane, largest);
    for (int step = 0; step < part.steps; ++step, slot.next()) {
      const bool mine = whose == warp, last = step == part.steps - 1;
      whose = whose == SCALE_WARPS - 1 ? 0 : whose + 1;
      if (!mine) continue;
      float f[PAIRS][PROMOTIONS + TELESCOPED];
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        factors_of(pairs[i], f[i], part, step, blocks);
      }
      barrier_wait(slot.empty(), slot.parity ^ 1);
      give_factors(slot, pairs, f, last);
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

// The schedule's.
template <bool>
struct Multipliers {
  using Type = Multiplier;
};
template <>
struct Multipliers<true> {
  using Type = Interleaved;
};

DEVICE void consume(const Arguments& x, int group) {
  const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
  Multipliers<INTERLEAVED>::Type multiplier(group, rank);
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
        if (SQUARES) store_squares(multiplier.acc[r], x.squares, x.to, row, part.tile.column);
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
  if (threadIdx.x == 0) start();
  // L1 may hold lines from before the first launch's inputs were written: the fence drops them.
  if (BAND == BELOW) __threadfence();
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();
  if (BAND == ABOVE && threadIdx.x == 0) start_next();
  if (group == GROUPS) {
    give_registers<PRODUCER_REGISTERS>();
    if (warp == 0 && lane == 0) load<Slot, Parts>(x);
    if (warp > 0) scale(x, warp - 1);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(x, group);
  }
  if (BAND == BELOW && threadIdx.x == 0) wait_for_previous();
  // A block's shared memory must outlast what its neighbours still send and signal.
  if (CLUSTER > 1) cluster_sync();
}
