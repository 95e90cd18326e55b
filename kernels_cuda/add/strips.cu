// Residual addition, forward: a bf16 stream plus INT8 codes, to their sum in bf16, its codes in
// blocks of 32, and the mean and rstd of its rows.
//
// A block of the grid has bands of 32 rows, whole, and its warps strips of 128 columns of a band,
// each by itself: TMA brings a strip to a stage of the warp's own, the warp writes the sum and its
// codes over what was there, and TMA takes them away. Nothing waits for another warp but a band's
// statistics, of which a warp keeps what its strips have: a lane those of one row.
#include "tile_codes.cuh"

constexpr int STRIP = SIDE * TILE;  // numbers
constexpr int BEHIND = STAGES > 1;  // how many strips ago a stage was left that is filled again

struct Arguments {
  TensorMap stream, codes;  // x and y, in boxes of a strip; if TMA
  TensorMap sum, q;         // what is written
  const uint16_t* x;
  int64_t pitch;  // of x, in elements
  Matrix y;
  float* scale;
  float* mean;
  float* rstd;
  float eps;
  int32_t m, n;
};

// What a row's numbers have in common: how many, their mean, and the sum of the squares of their
// differences from it.
struct Moments {
  float count, mean, squares;
};

struct Stage {
  uint16_t numbers[BOXES][SIDE * BOX];
  uint8_t codes[STRIP];
};

struct Shared {
  Stage stages[WARPS][STAGES];
  Moments moments[WARPS][SIDE];
  uint64_t arrived[WARPS][STAGES];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "as the host counts them");

// --- loading -------------------------------------------------------------------------------------

// Have a strip's numbers and codes come, zeros beyond the matrix. Lane 0 alone calls, if TMA.
DEVICE void fetch(Stage& to, uint64_t& arrival, int row0, int column0, const Arguments& p,
                  const PairLane& lane) {
  if constexpr (TMA) {
    const uint32_t arrived = shared_address(&arrival);
    barrier_expect(arrived, sizeof(Stage));
#pragma unroll
    for (int i = 0; i < BOXES; ++i) {
      tma_load(shared_address(to.numbers[i]), p.stream, column0 + i * BOX, row0, arrived);
    }
    tma_load(shared_address(to.codes), p.codes, column0, row0, arrived);
  } else {
    copy_pairs<SIDE, 32>(to.numbers, p.x, p.pitch, row0, column0, p.m, p.n, lane.index);
    copy_codes<SIDE, 32>(to.codes, p.y, row0, column0, p.m, p.n, lane.index);
    __syncwarp();
  }
}

// The scale of part `lane.index` of a strip.
DEVICE float scale_of(int row0, int column0, const Arguments& p, const PairLane& lane) {
  const int column = column0 + lane.index * SIDE;
  if (lane.index >= ACROSS || column >= p.n) return 0;
  return p.y.scales[row0 / BLOCK * p.y.scale_pitch + column / BLOCK];
}

// --- statistics ----------------------------------------------------------------------------------

// Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
// variances", 1979, equation 2.1.
DEVICE Moments join(const Moments& a, const Moments& b) {
  const float count = a.count + b.count, part = __fdividef(b.count, count), apart = b.mean - a.mean;
  return {count, fmaf(apart, part, a.mean),
          a.squares + b.squares + apart * (apart * (a.count * part))};
}

// A lane's four rows over a strip, of numbers less a pivot each, the mean of the first eight: of
// their squares' sum what the pivot's distance from the mean makes is at most four times the rest.
struct RowSums {
  float pivot[TALL], plain[TALL], squares[TALL];

  DEVICE void begin(const Pairs& numbers) {
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
      float sum = numbers.at(k, 0);
#pragma unroll
      for (int j = 1; j < WIDE; ++j) sum += numbers.at(k, j);
      pivot[k] = sum * (1.0f / WIDE);
      plain[k] = squares[k] = 0;
    }
  }

  DEVICE void add(const Pairs& numbers) {
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
#pragma unroll
      for (int j = 0; j < WIDE; ++j) {
        const float apart = numbers.at(k, j) - pivot[k];
        plain[k] += apart;
        squares[k] = fmaf(apart, apart, squares[k]);
      }
    }
  }

  // The moments of row `row_at(index % 4)`, whose numbers four lanes have, `count` each.
  DEVICE Moments row(int count, const PairLane& lane) const {
    const float each = __fdividef(1.0f, float(count));
    Moments rows[TALL];
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
      const float mean = plain[k] * each;
      rows[k] = {float(count), pivot[k] + mean, fmaf(-mean, plain[k], squares[k])};
    }
#pragma unroll
    for (int left = TALL / 2, bit = 1; left > 0; left /= 2, bit *= 2) {
#pragma unroll
      for (int i = 0; i < left; ++i) {
        const bool odd = lane.index & bit;
        const Moments sent = odd ? rows[2 * i] : rows[2 * i + 1];
        const Moments kept = odd ? rows[2 * i + 1] : rows[2 * i];
        const float mean = __shfl_xor_sync(ALL, sent.mean, bit);
        const float squares = __shfl_xor_sync(ALL, sent.squares, bit);
        const float apart = mean - kept.mean;
        rows[i] = {2 * kept.count, 0.5f * (mean + kept.mean),
                   kept.squares + squares + apart * (apart * (0.5f * kept.count))};
      }
    }
    return rows[0];
  }
};

// Write mean and rstd of a band's rows, a lane each, from what its warps have.
DEVICE void store_statistics(const Shared& shared, int row0, const Arguments& p,
                             const PairLane& lane) {
  const float count = p.n;
  float total = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    const Moments& of = shared.moments[i][lane.index];
    total = fmaf(of.mean, of.count, total);
  }
  const float mean = total / count;  // exact where all numbers of a row are equal
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    const Moments& of = shared.moments[i][lane.index];
    const float apart = of.mean - mean;
    squares += fmaf(apart * of.count, apart, of.squares);
  }
  const int row = row0 + lane.index;
  if (row >= p.m) return;
  p.mean[row] = mean;
  p.rstd[row] = rsqrtf(squares / count + p.eps);
}

// --- a strip -------------------------------------------------------------------------------------

// Write a part's sum and its codes over what they are made of.
DEVICE void add_part(Stage& stage, RowSums& sums, int part, float y_scale, int row0, int column,
                     const Arguments& p, const PairLane& lane) {
  Pairs total;
#pragma unroll
  for (int k = 0; k < TALL; ++k) {
    uint4* place = lane.pairs<SIDE>(stage.numbers, part, k);
    const auto [a, b, c, d] = *place;
    const uint32_t x[WIDE / 2] = {a, b, c, d};
    float y[WIDE];
    to_floats(y, *reinterpret_cast<const uint2*>(stage.codes + lane.place(part, k)));
#pragma unroll
    for (int j = 0; j < WIDE; j += 2) {
      total.pairs[k][j / 2] =
          pack_bf16(__fadd_rn(low_bf16(x[j / 2]), __fmul_rn(y[j], y_scale)),
                    __fadd_rn(high_bf16(x[j / 2]), __fmul_rn(y[j + 1], y_scale)));
    }
    const uint32_t(&sum)[WIDE / 2] = total.pairs[k];
    *place = {sum[0], sum[1], sum[2], sum[3]};
  }
  if (part == 0) sums.begin(total);
  sums.add(total);
  float scale, multiplier;
  block_scale(__reduce_max_sync(ALL, total.largest()), scale, multiplier);
  const int64_t at = int64_t(row0 / OUT_BLOCK) * ceil_div(p.n, OUT_BLOCK) + column / OUT_BLOCK;
  if (lane.index == 0) p.scale[at] = scale;
  uint2 codes[TALL];
  quantise<true>(codes, total, multiplier, 0, row0, column, lane);
  if_sound(codes, multiplier);
#pragma unroll
  for (int k = 0; k < TALL; ++k) {
    *reinterpret_cast<uint2*>(stage.codes + lane.place(part, k)) = codes[k];
  }
}

// Have TMA write a strip's sum and codes. Lane 0 alone calls.
DEVICE void store(const Stage& from, int row0, int column0, const Arguments& p) {
#pragma unroll
  for (int i = 0; i < BOXES; ++i) {
    tma_store(p.sum, shared_address(from.numbers[i]), column0 + i * BOX, row0);
  }
  tma_store(p.q, shared_address(from.codes), column0, row0);
  tma_commit();
}

// Go over a warp's strips; return what it has of a row's moments, a row per lane.
DEVICE Moments add_strips(Shared& shared, int row0, const Arguments& p, const PairLane& lane) {
  auto& stages = shared.stages[lane.warp];
  auto& arrived = shared.arrived[lane.warp];
  const bool fetches = !TMA || lane.index == 0;
  const int across = ceil_div(p.n, TILE);
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    const int strip = lane.warp + i * WARPS;
    if (fetches && strip < across) fetch(stages[i], arrived[i], row0, strip * TILE, p, lane);
  }
  Moments moments = {};
  float scale = scale_of(row0, lane.warp * TILE, p, lane);
  int stage = 0;
  uint32_t lap = 0;  // around the stages
#pragma unroll 1
  for (int strip = lane.warp; strip < across; strip += WARPS) {
    const float next_scale = scale_of(row0, (strip + WARPS) * TILE, p, lane);
    if (TMA) barrier_wait(shared_address(&arrived[stage]), lap % 2);
    const int parts = min(ACROSS, (p.n - strip * TILE) / SIDE);
    RowSums sums;
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      const int column = strip * TILE + part * SIDE;
      const float of_part = __shfl_sync(ALL, scale, part);
      add_part(stages[stage], sums, part, of_part, row0, column, p, lane);
    }
    moments = join(moments, sums.row(parts * WIDE, lane));
    scale = next_scale;
    fence_async();
    __syncwarp();
    if (lane.index == 0) store(stages[stage], row0, strip * TILE, p);
    // The stage that was left BEHIND strips ago.
    const int free = stage >= BEHIND ? stage - BEHIND : STAGES - 1;
    const int ahead = strip + (STAGES - BEHIND) * WARPS;
    if ((strip >= BEHIND * WARPS) && ahead < across) {
      if (lane.index == 0) tma_wait_read<BEHIND>();
      if (!TMA) __syncwarp();
      if (fetches) fetch(stages[free], arrived[free], row0, ahead * TILE, p, lane);
    }
    if (++stage == STAGES) stage = 0, ++lap;
  }
  return moments;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    strips(const __grid_constant__ Arguments p) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const PairLane lane;
  const int row0 = blockIdx.x * SIDE;
  if (TMA && lane.index == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) barrier_init(shared_address(&shared.arrived[lane.warp][i]), 1);
    fence_barrier_init();
  }
  __syncwarp();
  shared.moments[lane.warp][lane.row_at(lane.index % TALL)] = add_strips(shared, row0, p, lane);
  __syncthreads();
  if (lane.warp == 0) store_statistics(shared, row0, p, lane);
  if (lane.index == 0) tma_wait_read<0>();  // shared memory goes with the block
}
