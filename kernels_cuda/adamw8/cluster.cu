// AdamW with INT8 moments, and the new weight's codes, in one pass: a cluster has a tile of 128
// columns that is as high as the codes' blocks, and each of its blocks of the grid a slice of it.
//
// TMA brings a slice to shared memory, so that what is on its way takes no registers. A thread
// keeps its new weights until the largest of their block is known: each warp sends what its rows
// have of it to every block of the cluster.
#include "codes.cuh"
#include "config.cuh"

constexpr int GROUP = 128;  // numbers of a row that share a scale of the moments; a tile's columns
constexpr int EACH = GROUP / 32;    // columns of a lane
constexpr int PAIR = 2;             // rows whose groups have their scales made at once
constexpr int LINE = 128;           // bytes of a row of a box
constexpr int BOX = LINE / ELEMENT; // columns of a box of weights
constexpr int SLICE = WARPS * ROWS, THREADS = 32 * WARPS;
constexpr int ACROSS = GROUP / BLOCK;   // blocks of a tile
constexpr int SHARING = BLOCK / EACH;   // lanes that have a block's columns
constexpr int PARTS = CLUSTER * WARPS;  // warps that have a block's rows
constexpr bool WRITES_CODES = WRITES_Q || WRITES_QT, SENDS = WRITES_CODES && CLUSTER > 1;
constexpr uint32_t SIGN = 1u << 31;
static_assert(CLUSTER * SLICE == BLOCK, "a tile is as high as a block");

struct Arguments {
  TensorMap maps[4];  // of param, grad and codes, in boxes of SIDE rows of LINE bytes; if TMA
  uint8_t* param;     // fp32 or bf16, as is grad
  const uint8_t* grad;
  uint8_t* codes[2];
  float* scales[2];  // of their groups
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
  uint8_t codes[2][SLICE * GROUP];
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
  int weights_at, codes_at;  // where its first lie in shared memory
  int64_t first;             // which of a matrix' elements that is, if it is contiguous
  DEVICE explicit Lane(const Arguments& p)
      : index(threadIdx.x % 32), warp(threadIdx.x / 32), rank(blockIdx.x % CLUSTER),
        weights_at(place_in_boxes<ELEMENT>(warp, index)),
        codes_at(place_in_boxes<1>(warp, index)) {
    const int across = ceil_div(p.n, GROUP), tile = blockIdx.x / CLUSTER;
    row = tile / across * BLOCK + rank * SLICE + warp * ROWS;
    column = tile % across * GROUP + index * EACH;
    first = int64_t(row) * p.n + column;
    // Or each use would make them anew.
    asm volatile("" : "+r"(weights_at), "+r"(codes_at), "+l"(first));
  }
  // Where those of row k lie.
  template <int BYTES>
  DEVICE int place(int k) const {
    return (BYTES == 1 ? codes_at : weights_at) ^ k * (LINE + 16);  // no bit changes twice
  }
  DEVICE bool inside(int k, int j, const Arguments& p) const {
    return EVEN || row + k < p.m && column + (TMA ? 0 : j) < p.n;
  }
  // Of its warp's 2·ROWS groups a lane makes the scale of one: of which moment and which row.
  DEVICE int moment() const { return index / ROWS % 2; }
  DEVICE int scale_row() const { return index % ROWS; }
  DEVICE float* scale(const Arguments& p) const {
    float* scales = moment() ? p.scales[1] : p.scales[0];
    return scales + int64_t(row + scale_row()) * ceil_div(p.n, GROUP) + column / GROUP;
  }
};

// EACH elements of a row.
template <int BYTES>
struct alignas(EACH * BYTES) Quad {
  uint32_t words[BYTES];
  DEVICE float at(int j) const {
    if (BYTES == 4) return __uint_as_float(words[j]);
    return __uint_as_float(j % 2 ? words[j / 2] & 0xFFFF0000u : words[j / 2] << 16);
  }
};
using Weights = Quad<ELEMENT>;
using Codes = Quad<1>;

// Store elements of row k, or those within the matrix.
template <int BYTES>
DEVICE void store(uint8_t* to, const Quad<BYTES>& x, int k, const Lane& lane, const Arguments& p) {
  uint8_t* place = to + (lane.first + k * int64_t(p.n)) * BYTES;
  if constexpr (TMA) {
    if (lane.inside(k, 0, p)) *reinterpret_cast<Quad<BYTES>*>(place) = x;
  } else {
#pragma unroll
    for (int i = 0; i < EACH * BYTES; ++i) {
      if (lane.inside(k, i / BYTES, p)) place[i] = uint8_t(x.words[i / 4] >> i % 4 * 8);
    }
  }
}

// --- loading -------------------------------------------------------------------------------------

// Have a warp's boxes of a slice come, zeros beyond the matrix. Lane 0 calls: one warp alone would
// ask for all in 130 instructions.
DEVICE void fetch(Shared& shared, const Lane& lane, const Arguments& p) {
  constexpr int DOWN = SLICE / SIDE, BOXES = GROUP / BOX;
#pragma unroll 1
  for (int i = lane.warp; i < 2 * DOWN * (BOXES + 1); i += WARPS) {
    const int matrix = i % 2, row = i / 2 % DOWN * SIDE, box = i / 2 / DOWN;
    const bool codes = box == BOXES;
    const uint8_t* to =
        codes ? shared.codes[matrix] : shared.weights[matrix] + box * (SLICE * LINE);
    tma_load(shared_address(to + row * LINE), p.maps[codes ? 2 + matrix : matrix],
             lane.column + (codes ? 0 : box * BOX), lane.row - lane.warp * ROWS + row,
             shared_address(&shared.arrived));
  }
}

// Copy a lane's own elements from any address.
template <int BYTES>
DEVICE void copy(uint8_t* to, const uint8_t* from, int64_t pitch, const Lane& lane,
                 const Arguments& p) {
#pragma unroll 1
  for (int k = 0; k < ROWS; ++k) {
#pragma unroll
    for (int i = 0; i < EACH * BYTES; ++i) {
      const int64_t at = ((lane.row + k) * pitch + lane.column) * BYTES + i;
      to[lane.place<BYTES>(k) + i] = lane.inside(k, i / BYTES, p) ? from[at] : 0;
    }
  }
}

DEVICE void load(Shared& shared, const Lane& lane, const Arguments& p) {
  if (TMA) {
    if (lane.index == 0) fetch(shared, lane, p);
    return;
  }
  copy<ELEMENT>(shared.weights[0], p.param, p.n, lane, p);
  copy<ELEMENT>(shared.weights[1], p.grad, p.pitch, lane, p);
  copy<1>(shared.codes[0], p.codes[0], p.n, lane, p);
  copy<1>(shared.codes[1], p.codes[1], p.n, lane, p);
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

// --- the step ------------------------------------------------------------------------------------

// √x of x ≥ 2^-100, correctly rounded as `sqrt.rn` does within its range; 0 of 0, NaN of infinity.
DEVICE float root_of(float x) {
  const float y = fminf(inverse_root(x), 0x1p64f);
  const float first = __fmul_rn(x, y);
  return __fmaf_rn(__fmaf_rn(-first, first, x), 0.5f * y, first);
}

// The same of any x ≥ 0.
DEVICE float root_of_any(float x) {
  const bool small = x < 0x1p-64f;
  const float root = root_of(small ? x * 0x1p96f : x);
  return small ? root * 0x1p-48f : root;
}

// The same, and infinity of infinity. Without its minimum NaN comes of 0 and of infinity, and what
// is no more than √x of either takes its place.
DEVICE float full_root_of(float x) {
  const bool small = x < 0x1p-64f;
  const float wide = small ? x * 0x1p96f : x;
  const float y = inverse_root(wide), first = __fmul_rn(wide, y);
  const float root = __fmaf_rn(__fmaf_rn(-first, first, wide), 0.5f * y, first);
  return fmaxf(small ? root * 0x1p-48f : root, x * 0x1p-126f);
}

// Codes as floats, less `zero`: 2^23 + 128 + the code, less that.
DEVICE void unpack(float (&to)[EACH], Codes codes, float zero) {
  uint32_t exponent = 0x4B000000u;
  asm("" : "+r"(exponent));  // or the selectors would be in registers, a copy for each use
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const uint32_t bits = __byte_perm(codes.words[0] ^ 0x80808080u, exponent, 0x7650 | j);
    to[j] = __fsub_rn(__uint_as_float(bits), 0x1p23f + 128.0f + zero);
  }
}

// Four codes, 0 where the multiplier is 0.
DEVICE uint32_t codes_of(const float (&x)[EACH], float multiplier) {
  uint32_t codes[EACH];
#pragma unroll
  for (int j = 0; j < EACH; ++j) codes[j] = code_nearest(__fmul_rn(x[j], multiplier));
  return multiplier != 0 ? pack(codes[0], codes[1], codes[2], codes[3]) : 0;
}

// Those of second moments' roots, whose codes count half scales from -127 on.
DEVICE uint32_t second_codes_of(const float (&x)[EACH], float multiplier) {
  uint32_t codes[EACH];
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const float units = __fmul_rn(x[j], multiplier);
    codes[j] = code_nearest(fmaxf(__fmaf_rn(units, 2.0f, -127.0f), -126.0f));
  }
  return multiplier != 0 ? pack(codes[0], codes[1], codes[2], codes[3]) : 0;
}

// A row's moments and the largest of its group, of the roots that their codes count.
struct Roots {
  float of[2][EACH];
  uint32_t most[2];
};

// Make row k's new weights, and the roots of its moments, whose groups have the scales m_scale and
// 2·v_half.
DEVICE void update_row(float (&param)[EACH], Roots& roots, const Shared& shared, int k,
                       float m_scale, float v_half, const Scalars& scalars, const Lane& lane,
                       const Arguments& p) {
  const int place = lane.place<ELEMENT>(k), codes_place = lane.place<1>(k);
  const Weights old = *reinterpret_cast<const Weights*>(shared.weights[0] + place);
  const Weights grad = *reinterpret_cast<const Weights*>(shared.weights[1] + place);
  float ys[EACH], zs[EACH];
  unpack(ys, *reinterpret_cast<const Codes*>(shared.codes[0] + codes_place), 0.0f);
  unpack(zs, *reinterpret_cast<const Codes*>(shared.codes[1] + codes_place), -127.0f);
  uint32_t most[2] = {};
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const float y = __fmul_rn(ys[j], m_scale), z = __fmul_rn(zs[j], v_half);
    const float g = GUARDED ? __fmul_rn(grad.at(j), scalars.inverse) : grad.at(j);
    const float square = __fmul_rn(z, z), weight = old.at(j);
    const float m =
        __fadd_rn(__fmul_rn(__fmul_rn(y, fabsf(y)), p.beta[0]), __fmul_rn(g, p.share[0]));
    float v = __fadd_rn(__fmul_rn(__fmul_rn(square, square), p.beta[1]),
                        __fmul_rn(__fmul_rn(g, g), p.share[1]));
    if (!lane.inside(k, j, p)) v = 0;  // where a code of 0 stands for no 0
    const float s = full_root_of(v), moved = __fmul_rn(scalars.size, m);
    const float update = __fmul_rn(moved, reciprocal(__fmaf_rn(s, scalars.root, p.eps)));
    const float fresh = __fsub_rn(__fmaf_rn(weight, -scalars.shrink, weight), update);
    param[j] = GUARDED && scalars.failed ? weight : fresh;
    const uint32_t first = __float_as_uint(root_of_any(fabsf(m)));
    roots.of[0][j] = __uint_as_float(first | __float_as_uint(m) & SIGN);
    roots.of[1][j] = root_of(s);
    most[0] = max(most[0], first);
    most[1] = max(most[1], __float_as_uint(roots.of[1][j]));
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) roots.most[i] = __reduce_max_sync(ALL, most[i]);
}

// Round two rows to bf16, away from zero with the probability of what lies below, as the reference.
DEVICE void narrow(float (&param)[ROWS][EACH], int k, uint64_t seed, const Lane& lane) {
  // Two lanes share the eight numbers of a draw: each makes one row's, and they exchange halves.
  const bool odd = lane.index % 2;
  const Words mine = philox(seed, lane.column / 8, lane.row + k + odd);
  uint32_t bits[PAIR][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(ALL, odd ? mine.w[i] : mine.w[2 + i], 1);
    bits[0][i] = odd ? got : mine.w[i];
    bits[1][i] = odd ? mine.w[2 + i] : got;
  }
#pragma unroll
  for (int i = 0; i < PAIR; ++i) {
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      float& x = param[k + i][j];
      const uint32_t drawn = j % 2 ? bits[i][j / 2] >> 16 : bits[i][j / 2] & 0xFFFFu;
      const uint32_t top = __float_as_uint(x) + drawn & 0xFFFF0000u;
      x = __uint_as_float(x == x ? top : 0x7FC00000u);
    }
  }
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

// Make the step of rows k and k + 1, whose old groups' scales lanes have; return the lane's new one
// if that is of these rows.
DEVICE float update(float (&param)[ROWS][EACH], const Shared& shared, int k, float held,
                    const Scalars& scalars, const Lane& lane, const Arguments& p) {
  Roots roots[PAIR];
#pragma unroll
  for (int i = 0; i < PAIR; ++i) {
    const float m_scale = __shfl_sync(ALL, held, k + i);
    const float v_half = __shfl_sync(ALL, held, ROWS + k + i);
    update_row(param[k + i], roots[i], shared, k + i, m_scale, v_half, scalars, lane, p);
  }
  if (ELEMENT == 2) narrow(param, k, scalars.seed, lane);
  const bool odd = lane.index % PAIR;
  const uint32_t firsts = odd ? roots[1].most[0] : roots[0].most[0];
  const uint32_t seconds = odd ? roots[1].most[1] : roots[0].most[1];
  float scale, multiplier;
  block_scale(lane.moment() ? seconds : firsts, scale, multiplier);
#pragma unroll
  for (int i = 0; i < PAIR; ++i) {
    const float first = __shfl_sync(ALL, multiplier, k + i);
    const float second = __shfl_sync(ALL, multiplier, ROWS + k + i);
    if (GUARDED && scalars.failed) continue;
    store_weights(param[k + i], k + i, lane, p);
    store(p.codes[0], Codes{codes_of(roots[i].of[0], first)}, k + i, lane, p);
    store(p.codes[1], Codes{second_codes_of(roots[i].of[1], second)}, k + i, lane, p);
  }
  return scale;
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

// --- all of it -----------------------------------------------------------------------------------

// Have the barriers ready for all threads, and say so to the cluster's other blocks, if codes are
// to be written, without waiting for these.
DEVICE void begin(Shared& shared) {
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&shared.arrived), 1);
    barrier_init(shared_address(&shared.known), 1);
    fence_barrier_init();
    barrier_expect(shared_address(&shared.arrived), sizeof(shared.weights) + sizeof(shared.codes));
    barrier_expect(shared_address(&shared.known), sizeof(shared.most));
  }
  if (SENDS) asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  __syncthreads();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
    cluster(const __grid_constant__ Arguments p) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Lane lane(p);
  begin(shared);
  load(shared, lane, p);
  const bool within = EVEN || lane.row + lane.scale_row() < p.m;
  const float scale = within ? *lane.scale(p) : 0.0f, held = lane.moment() ? 0.5f * scale : scale;
  const Scalars scalars(p);  // while the slice is on its way
  if (TMA) barrier_wait(shared_address(&shared.arrived), 0);
  float param[ROWS][EACH], fresh = 0;
#pragma unroll
  for (int k = 0; k < ROWS; k += PAIR) {
    const float found = update(param, shared, k, held, scalars, lane, p);
    if (lane.scale_row() / PAIR == k / PAIR) fresh = found;
  }
  if (within && lane.index < 2 * ROWS && !scalars.failed) *lane.scale(p) = fresh;
  if (!WRITES_CODES) return;
  // Until the others' barriers are ready.
  if (SENDS) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  give_most(shared, param, lane, p);
  if (SENDS) barrier_wait(shared_address(&shared.known), 0);
  __syncthreads();  // until all have read the weights, over which columns are written
  quantise(shared, param, lane, p);
}
