// A step of AdamW on a weight, and its codes, in one pass: what is the same however moments are
// kept. A cluster has a tile of 128 columns that is as high as the codes' blocks, and each of its
// blocks of the grid a slice of it.
//
// TMA brings a slice to shared memory, so that what is on its way takes no registers. A thread
// keeps its new weights until the largest of their block is known: each warp sends what its rows
// have of it to every block of the cluster.
#pragma once

#include "codes.cuh"
#include "config.cuh"

constexpr int GROUP = 128;        // a tile's columns; where moments are codes, of a scale of theirs
constexpr int EACH = GROUP / 32;  // columns of a lane
constexpr int LINE = 128;         // bytes of a row of a box
constexpr int BOX = LINE / ELEMENT, MOMENT_BOX = LINE / MOMENT;  // columns of a box
constexpr int SLICE = WARPS * ROWS, THREADS = 32 * WARPS;
constexpr int ACROSS = GROUP / BLOCK;   // blocks of a tile
constexpr int SHARING = BLOCK / EACH;   // lanes that have a block's columns
constexpr int PARTS = CLUSTER * WARPS;  // warps that have a block's rows
constexpr bool WRITES_CODES = WRITES_Q || WRITES_QT, SENDS = WRITES_CODES && CLUSTER > 1;
constexpr uint32_t SIGN = 1u << 31;
static_assert(CLUSTER * SLICE == BLOCK, "a tile is as high as a block");

struct Arguments {
  TensorMap maps[4];  // of param, grad and moments, in boxes of SIDE rows of LINE bytes; if TMA
  uint8_t* param;     // fp32 or bf16, as is grad
  const uint8_t* grad;
  uint8_t* moments[2];  // fp32 or codes
  float* scales[2];     // of codes' groups
  uint8_t* q;
  float* scale;
  uint8_t* qt;
  float* scale_t;
  const float* rate;
  const float* step;
  const float* grad_scale;
  const float* found_inf;
  const uint64_t* seed;
  int64_t pitch;  // of grad, in elements
  float beta[2];
  float share[2];  // 1 − beta
  float log_beta[2];
  float eps, decay;
  int32_t m, n;
};

// Codes of four rows each, transposed; padded, so that threads read and write all banks.
using Columns = uint32_t[SLICE / TALL][GROUP + EACH];

struct Shared {
  uint8_t weights[2][ELEMENT * SLICE * GROUP];  // param and grad; then Columns
  uint8_t moments[2][MOMENT * SLICE * GROUP];
  uint32_t most[ACROSS][PARTS];  // the bits of the largest of a block that each warp has
  uint64_t arrived, known;       // barriers: the slice has come; `most` has
};
static_assert(sizeof(Shared) == SHARED_BYTES, "as the host counts them");
static_assert(sizeof(Columns) <= sizeof(Shared::weights), "they lie where weights were");

extern __shared__ __align__(1024) uint8_t memory[];  // TMA's swizzle wants it

// --- places --------------------------------------------------------------------------------------

// Where a lane's elements of its warp's first row lie among boxes of rows of LINE bytes, as TMA's
// swizzle has them.
template <int BYTES>
DEVICE int place_in_boxes(int warp, int index) {
  const int row = warp * ROWS, from = index * EACH * BYTES, unit = from % LINE / 16;
  return from / LINE * (SLICE * LINE) + row * LINE + (unit ^ row % 8) * 16 + from % 16;
}

// A lane has EACH columns of its warp's ROWS rows.
struct Lane {
  int index, warp, rank, row, column;
  int weights_at, moments_at;  // where its first lie in shared memory
  int64_t first;               // which of a matrix' elements that is, if it is contiguous
  DEVICE explicit Lane(const Arguments& p)
      : index(threadIdx.x % 32), warp(threadIdx.x / 32), rank(blockIdx.x % CLUSTER),
        weights_at(place_in_boxes<ELEMENT>(warp, index)),
        moments_at(place_in_boxes<MOMENT>(warp, index)) {
    const int across = ceil_div(p.n, GROUP), tile = blockIdx.x / CLUSTER;
    row = tile / across * BLOCK + rank * SLICE + warp * ROWS;
    column = tile % across * GROUP + index * EACH;
    first = int64_t(row) * p.n + column;
    // Or each use would make them anew.
    asm volatile("" : "+r"(weights_at), "+l"(first));
    if (MOMENT != ELEMENT) asm volatile("" : "+r"(moments_at));
  }
  // Where those of row k lie, of so many bytes each.
  template <int BYTES>
  DEVICE int place(int k) const {
    return (BYTES == ELEMENT ? weights_at : moments_at) ^ k * (LINE + 16);  // no bit changes twice
  }
  DEVICE bool inside(int k, int j, const Arguments& p) const {
    return EVEN || row + k < p.m && column + (TMA ? 0 : j) < p.n;
  }
};

// An element's bits.
template <int BYTES>
struct Bits {
  using Type = uint8_t;
};
template <>
struct Bits<2> {
  using Type = uint16_t;
};
template <>
struct Bits<4> {
  using Type = uint32_t;
};

// EACH elements of a row.
template <int BYTES>
struct alignas(EACH * BYTES) Quad {
  using Element = typename Bits<BYTES>::Type;
  uint32_t words[BYTES];
  DEVICE Element bits(int j) const { return Element(words[j * BYTES / 4] >> j * BYTES % 4 * 8); }
  DEVICE float at(int j) const {
    if (BYTES == 4) return __uint_as_float(words[j]);
    return __uint_as_float(j % 2 ? words[j / 2] & 0xFFFF0000u : words[j / 2] << 16);
  }
};
using Weights = Quad<ELEMENT>;
using Moments = Quad<MOMENT>;
using Codes = Quad<1>;

// Store elements of row k, or those within the matrix.
template <int BYTES>
DEVICE void store(uint8_t* to, const Quad<BYTES>& x, int k, const Lane& lane, const Arguments& p) {
  uint8_t* place = to + (lane.first + k * int64_t(p.n)) * BYTES;
  if constexpr (TMA) {
    if (lane.inside(k, 0, p)) *reinterpret_cast<Quad<BYTES>*>(place) = x;
  } else {
    auto* places = reinterpret_cast<typename Quad<BYTES>::Element*>(place);
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      if (lane.inside(k, j, p)) places[j] = x.bits(j);
    }
  }
}

// --- loading -------------------------------------------------------------------------------------

// Have a warp's boxes of a slice come, zeros beyond the matrix. Lane 0 calls: one warp alone would
// ask for all in 130 instructions.
DEVICE void fetch(Shared& shared, const Lane& lane, const Arguments& p) {
  constexpr int DOWN = SLICE / SIDE, BOXES = GROUP / BOX, ALL_BOXES = BOXES + GROUP / MOMENT_BOX;
#pragma unroll 1
  for (int i = lane.warp; i < 2 * DOWN * ALL_BOXES; i += WARPS) {
    const int matrix = i % 2, row = i / 2 % DOWN * SIDE, box = i / 2 / DOWN;
    const bool moments = box >= BOXES;
    const int within = moments ? box - BOXES : box;
    const uint8_t* place = moments ? shared.moments[matrix] : shared.weights[matrix];
    const uint8_t* to = place + within * (SLICE * LINE);
    tma_load(shared_address(to + row * LINE), p.maps[moments ? 2 + matrix : matrix],
             lane.column + within * (moments ? MOMENT_BOX : BOX), lane.row - lane.warp * ROWS + row,
             shared_address(&shared.arrived));
  }
}

// Copy a lane's own elements one by one.
template <int BYTES>
DEVICE void copy(uint8_t* to, const uint8_t* from, int64_t pitch, const Lane& lane,
                 const Arguments& p) {
  using Element = typename Quad<BYTES>::Element;
#pragma unroll 1
  for (int k = 0; k < ROWS; ++k) {
    Element* place = reinterpret_cast<Element*>(to + lane.place<BYTES>(k));
    const int64_t first = (lane.row + k) * pitch + lane.column;
    const Element* source = reinterpret_cast<const Element*>(from) + first;
#pragma unroll
    for (int j = 0; j < EACH; ++j) place[j] = lane.inside(k, j, p) ? source[j] : Element(0);
  }
}

DEVICE void load(Shared& shared, const Lane& lane, const Arguments& p) {
  if (TMA) {
    if (lane.index == 0) fetch(shared, lane, p);
    return;
  }
  copy<ELEMENT>(shared.weights[0], p.param, p.n, lane, p);
  copy<ELEMENT>(shared.weights[1], p.grad, p.pitch, lane, p);
  copy<MOMENT>(shared.moments[0], p.moments[0], p.n, lane, p);
  copy<MOMENT>(shared.moments[1], p.moments[1], p.n, lane, p);
}

// --- scalars -------------------------------------------------------------------------------------

// 1 − e^y for y = step·ln(beta), to 2^-21 relatively; near 0 by the series of e^y − 1.
DEVICE float bias_correction(float step, float log_beta) {
  const float y = fmaxf(step * log_beta, -104.0f);
  float series = fmaf(y, 1.0f / 5040, 1.0f / 720);
  series = fmaf(y, series, 1.0f / 120);
  series = fmaf(y, series, 1.0f / 24);
  series = fmaf(y, series, 1.0f / 6);
  series = fmaf(y, series, 0.5f);
  series = fmaf(y, series, 1.0f);
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(y * 1.4426950408889634f));
  return y > -0.5f ? -y * series : 1.0f - power;
}

DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float inverse_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct Scalars {
  float shrink;      // rate·decay
  float size, root;  // rate/(1 − beta1^t) and (1 − beta2^t)^-½
  float inverse;     // of grad_scale
  bool failed;
  uint64_t seed;

  DEVICE explicit Scalars(const Arguments& p) : inverse(1), failed(false), seed(0) {
    const float rate = *p.rate, step = *p.step;
    shrink = rate * p.decay;
    size = rate * reciprocal(bias_correction(step, p.log_beta[0]));
    root = inverse_root(bias_correction(step, p.log_beta[1]));
    if (GUARDED) inverse = __fdiv_rn(1.0f, *p.grad_scale), failed = *p.found_inf != 0;
    if (ELEMENT == 2) seed = *p.seed;
  }
};

// The weight after a step of the first moment m and the root of the second.
DEVICE float stepped(float weight, float m, float root, const Scalars& scalars,
                     const Arguments& p) {
  const float moved = __fmul_rn(scalars.size, m);
  const float update = __fmul_rn(moved, reciprocal(__fmaf_rn(root, scalars.root, p.eps)));
  const float fresh = __fsub_rn(__fmaf_rn(weight, -scalars.shrink, weight), update);
  return GUARDED && scalars.failed ? weight : fresh;
}

DEVICE void store_weights(const float (&param)[EACH], int k, const Lane& lane, const Arguments& p) {
  Weights fresh;
#pragma unroll
  for (int i = 0; i < ELEMENT; ++i) {
    const uint32_t first = __float_as_uint(param[EACH / ELEMENT * i]);
    const uint32_t last = __float_as_uint(param[EACH / ELEMENT * i + EACH / ELEMENT - 1]);
    fresh.words[i] = ELEMENT == 4 ? first : __byte_perm(first, last, 0x7632);
  }
  store(p.param, fresh, k, lane, p);
}

// --- the codes -----------------------------------------------------------------------------------

// The largest of the lanes that have a block's columns.
DEVICE uint32_t sharing_most(uint32_t most) {
  if (SHARING == 32) return __reduce_max_sync(ALL, most);
#pragma unroll
  for (int step = 1; step < SHARING; step *= 2) most = max(most, __shfl_xor_sync(ALL, most, step));
  return most;
}

// Write a word to where it lies in another block of the cluster, whose barrier counts its bytes.
DEVICE void send(const uint32_t& to, const uint64_t& barrier, uint32_t rank, uint32_t x) {
  asm volatile(
      "{\n.reg .b32 place, counted;\n"
      "mapa.shared::cluster.u32 place, %0, %2;\n"
      "mapa.shared::cluster.u32 counted, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [place], %3, [counted];\n}"
      ::"r"(shared_address(&to)), "r"(shared_address(&barrier)), "r"(rank), "r"(x) : "memory");
}

// Give every block of the cluster what this warp has of the largest of blocks.
DEVICE void give_most(Shared& shared, const float (&param)[ROWS][EACH], const Lane& lane,
                      const Arguments& p) {
  uint32_t most = 0;
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      if (lane.inside(k, j, p)) most = max(most, __float_as_uint(param[k][j]) & ~SIGN);
    }
  }
  const int block = lane.index % ACROSS, to = lane.index / ACROSS;
  most = __shfl_sync(ALL, sharing_most(most), block * SHARING);
  if (to >= CLUSTER) return;
  uint32_t& place = shared.most[block][lane.rank * WARPS + lane.warp];
  if (SENDS) send(place, shared.known, to, most);
  else place = most;
}

DEVICE void store_scale(float scale, const Lane& lane, const Arguments& p) {
  if (lane.rank || lane.warp || lane.index % SHARING || !lane.inside(0, 0, p)) return;
  const int64_t row = lane.row / BLOCK, column = lane.column / BLOCK;
  if (WRITES_Q) p.scale[row * ceil_div(p.n, BLOCK) + column] = scale;
  if (WRITES_QT) p.scale_t[column * ceil_div(p.m, BLOCK) + row] = scale;
}

// Columns' runs of sixteen codes, two neighbouring threads a sector.
DEVICE void store_columns(const Columns& columns, const Lane& lane, const Arguments& p) {
  constexpr int RUN = 16;
  const int row0 = lane.row - lane.warp * ROWS, column0 = lane.column - lane.index * EACH;
#pragma unroll
  for (int begin = 0; begin < GROUP * SLICE / RUN; begin += THREADS) {
    const int i = begin + threadIdx.x, within = i / 2 % GROUP, run = i / (2 * GROUP) * 2 + i % 2;
    const int row = row0 + run * RUN, column = column0 + within;
    if (!EVEN && column >= p.n) continue;
    uint32_t words[RUN / TALL];
#pragma unroll
    for (int j = 0; j < RUN / TALL; ++j) words[j] = columns[run * RUN / TALL + j][within];
    uint8_t* to = p.qt + int64_t(column) * p.m + row;
    if constexpr (QT_ACCESS == RUN) {
      if (EVEN || row < p.m) {
        *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
      }
    } else {
#pragma unroll
      for (int j = 0; j < RUN; ++j) {
        if (EVEN || row + j < p.m) to[j] = uint8_t(words[j / TALL] >> j % TALL * 8);
      }
    }
  }
}

// Four codes, 0 where the multiplier is 0.
DEVICE uint32_t codes_of(const float (&x)[EACH], float multiplier) {
  uint32_t codes[EACH];
#pragma unroll
  for (int j = 0; j < EACH; ++j) codes[j] = code_nearest(__fmul_rn(x[j], multiplier));
  return multiplier != 0 ? pack(codes[0], codes[1], codes[2], codes[3]) : 0;
}

DEVICE void quantise(Shared& shared, const float (&param)[ROWS][EACH], const Lane& lane,
                     const Arguments& p) {
  const uint32_t part = shared.most[lane.index / SHARING][lane.index % PARTS];
  float scale, multiplier;
  block_scale(sharing_most(part), scale, multiplier);
  store_scale(scale, lane, p);
  Columns& columns = *reinterpret_cast<Columns*>(shared.weights);
  uint32_t words[ROWS];
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
    words[k] = codes_of(param[k], multiplier);
    if (WRITES_Q) store(p.q, Codes{words[k]}, k, lane, p);
  }
  if (!WRITES_QT) return;
#pragma unroll
  for (int k = 0; k < ROWS; k += TALL) {
    uint32_t turned[EACH];
    transpose(turned, words[k], words[k + 1], words[k + 2], words[k + 3], false);
    uint32_t* to = &columns[(lane.warp * ROWS + k) / TALL][lane.index * EACH];
    *reinterpret_cast<uint4*>(to) = {turned[0], turned[1], turned[2], turned[3]};
  }
  __syncthreads();
  store_columns(columns, lane, p);
}

// Write the codes of a cluster's new weights, if any are to be.
DEVICE void write_codes(Shared& shared, const float (&param)[ROWS][EACH], const Lane& lane,
                        const Arguments& p) {
  if (!WRITES_CODES) return;
  // Until the others' barriers are ready.
  if (SENDS) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  give_most(shared, param, lane, p);
  if (SENDS) barrier_wait(shared_address(&shared.known), 0);
  __syncthreads();  // until all have read the weights, over which columns are written
  quantise(shared, param, lane, p);
}

// --- the beginning -------------------------------------------------------------------------------

// Have the barriers ready for all threads, and say so to the cluster's other blocks, if codes are
// to be written, without waiting for these.
DEVICE void begin(Shared& shared) {
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&shared.arrived), 1);
    barrier_init(shared_address(&shared.known), 1);
    fence_barrier_init();
    constexpr int SLICES = sizeof(shared.weights) + sizeof(shared.moments);
    barrier_expect(shared_address(&shared.arrived), SLICES);
    barrier_expect(shared_address(&shared.known), sizeof(shared.most));
  }
  if (SENDS) asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  __syncthreads();
}
