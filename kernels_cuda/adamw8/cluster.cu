// AdamW with INT8 moments, and the new weight's codes, in one pass: a cluster has a row of tiles of
// 128 columns as high as the codes' blocks, its blocks of the grid a slice of rows each.
//
// A thread keeps its new weights in registers until the largest of their block is known: each warp
// writes what its rows have of it to the shared memory of every block of the cluster.
#include "codes.cuh"
#include "config.cuh"

constexpr int GROUP = 128;  // numbers of a row that share a scale of the moments; a tile's columns
constexpr int EACH = GROUP / 32;  // columns of a lane
constexpr int PAIR = 2;           // rows whose groups have their scales made at once
constexpr int THREADS = 32 * WARPS, SLICE = WARPS * ROWS;
constexpr int ACROSS = GROUP / BLOCK;   // blocks of a tile
constexpr int SHARING = BLOCK / EACH;   // lanes that have a block's columns
constexpr int PARTS = CLUSTER * WARPS;  // warps that have a block's rows
constexpr bool WRITES_CODES = WRITES_Q || WRITES_QT;
constexpr uint32_t SIGN = 1u << 31;
static_assert(!WRITES_CODES || CLUSTER * SLICE == BLOCK, "a tile is as high as a block");

struct Arguments {
  uint8_t* param;  // fp32 or bf16, as is grad
  const uint8_t* grad;
  uint8_t* codes[2];  // of both moments
  float* scales[2];   // of their groups
  uint8_t* q;
  float* scale;
  uint8_t* qt;
  float* scale_t;
  const float* rate;
  const float* step;
  const float* grad_scale;
  const float* found_inf;
  const uint64_t* seed;
  int64_t pitch;        // of grad, in elements
  float beta[2];
  float share[2];       // 1 − beta
  float log_beta[2];
  float eps, decay;
  int32_t m, n;
};

struct Shared {
  uint32_t most[ACROSS][PARTS];  // the bits of the largest of a block that each warp has
  uint32_t columns[SLICE / TALL][GROUP + EACH];  // codes of four rows; padded against conflicts
};

// --- clusters ------------------------------------------------------------------------------------

// With nothing to be seen by others, before memory of blocks that may not have begun is written.
DEVICE void begin_cluster() {
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;");
}

DEVICE void arrive_cluster() {
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

DEVICE void wait_cluster() {
  if (CLUSTER > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Write a word to where it lies in another block of the cluster.
DEVICE void store_at(const uint32_t& to, uint32_t rank, uint32_t x) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.u32 [remote], %2;\n}"
      ::"r"(shared_address(&to)), "r"(rank), "r"(x) : "memory");
}

// --- numbers of a thread -------------------------------------------------------------------------

struct alignas(EACH * ELEMENT) Quad {
  uint32_t words[ELEMENT];
  DEVICE float at(int j) const {
    if (ELEMENT == 4) return __uint_as_float(words[j]);
    return __uint_as_float(j % 2 ? words[j / 2] & 0xFFFF0000u : words[j / 2] << 16);
  }
};

// A lane has EACH columns of its warp's ROWS rows.
struct Lane {
  int index, warp, row, column, rank;
  DEVICE explicit Lane(const Arguments& p) : index(threadIdx.x % 32), warp(threadIdx.x / 32) {
    const int across = ceil_div(p.n, GROUP), tile = blockIdx.x / CLUSTER;
    rank = blockIdx.x % CLUSTER;
    row = tile / across * (CLUSTER * SLICE) + rank * SLICE + warp * ROWS;
    column = tile % across * GROUP + index * EACH;
  }
  DEVICE bool inside(int k, int j, const Arguments& p) const {
    return row + k < p.m && column + (VECTORS ? 0 : j) < p.n;
  }
  // Of its 2·ROWS groups a lane makes the scale of one: of which moment, and of which row.
  DEVICE int moment() const { return index / ROWS % 2; }
  DEVICE int scale_row() const { return index % ROWS; }
};

// EACH elements of row k; bytes of `other` beyond the matrix.
template <class Word>
DEVICE Word load(const uint8_t* from, int64_t at, int k, uint32_t other, const Lane& lane,
                 const Arguments& p) {
  constexpr int BYTES = sizeof(Word) / EACH;
  Word x;
  uint32_t* words = reinterpret_cast<uint32_t*>(&x);
#pragma unroll
  for (int i = 0; i < BYTES; ++i) words[i] = other;
  if constexpr (VECTORS) {
    if (lane.inside(k, 0, p)) x = *reinterpret_cast<const Word*>(from + at * BYTES);
  } else {
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      if (!lane.inside(k, j, p)) continue;
      const uint8_t* place = from + (at + j) * BYTES;
      if constexpr (BYTES == 4) words[j] = *reinterpret_cast<const uint32_t*>(place);
      else if constexpr (BYTES == 2)
        words[j / 2] = __byte_perm(words[j / 2], *reinterpret_cast<const uint16_t*>(place),
                                   j % 2 ? 0x5410 : 0x3254);
      else words[0] = __byte_perm(words[0], *place, 0x3210 & ~(15 << 4 * j) | 4 << 4 * j);
    }
  }
  return x;
}

template <class Word>
DEVICE void store(uint8_t* to, int64_t at, int k, const Word& x, const Lane& lane,
                  const Arguments& p) {
  constexpr int BYTES = sizeof(Word) / EACH;
  if constexpr (VECTORS) {
    if (lane.inside(k, 0, p)) *reinterpret_cast<Word*>(to + at * BYTES) = x;
  } else {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&x);
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      if (!lane.inside(k, j, p)) continue;
      uint8_t* place = to + (at + j) * BYTES;
      if constexpr (BYTES == 4) *reinterpret_cast<uint32_t*>(place) = words[j];
      else if constexpr (BYTES == 2)
        *reinterpret_cast<uint16_t*>(place) = uint16_t(words[j / 2] >> j % 2 * 16);
      else *place = uint8_t(words[0] >> j * 8);
    }
  }
}

struct Numbers {
  Quad param[ROWS], grad[ROWS];
  uint32_t codes[2][ROWS];
  float scale;  // that of the lane's group

  DEVICE Numbers(const Lane& lane, const Arguments& p) {
    const int row = lane.row + lane.scale_row();
    scale = row < p.m ? *scale_at(row, lane, p) : 0.0f;
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
      const int64_t at = int64_t(lane.row + k) * p.n + lane.column;
      param[k] = load<Quad>(p.param, at, k, 0, lane, p);
      grad[k] = load<Quad>(p.grad, (lane.row + k) * p.pitch + lane.column, k, 0, lane, p);
      codes[0][k] = load<uint32_t>(p.codes[0], at, k, 0, lane, p);
      // A second moment's code of -127 stands for 0; there is none within.
      codes[1][k] = load<uint32_t>(p.codes[1], at, k, 0x81818181u, lane, p);
    }
  }

  static DEVICE float* scale_at(int row, const Lane& lane, const Arguments& p) {
    float* scales = lane.moment() ? p.scales[1] : p.scales[0];
    return scales + int64_t(row) * ceil_div(p.n, GROUP) + lane.column / GROUP;
  }
};

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

// The same of any x ≥ 0 but infinity.
DEVICE float root_of_any(float x) {
  const bool small = x < 0x1p-64f;
  const float root = root_of(small ? x * 0x1p96f : x);
  return small ? root * 0x1p-48f : root;
}

// The larger in the order of magnitudes, NaN above all.
DEVICE uint32_t magnitude(float x) { return __float_as_uint(x) & ~SIGN; }

// Codes as floats, less `zero`, of a word of four: 2^23 + 128 + the code, less that.
DEVICE void unpack(float (&to)[EACH], uint32_t codes, float zero) {
  codes ^= 0x80808080u;
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const uint32_t bits = __byte_perm(codes, 0x4B000000u, 0x7650 | j);
    to[j] = __uint_as_float(bits) - (0x1p23f + 128.0f + zero);
  }
}

// A row's new weights, over the old, and the roots of its moments whose codes are kept.
DEVICE void update_row(float (&param)[EACH], float (&roots)[2][EACH], const Quad& grad,
                       uint32_t m_codes, uint32_t v_codes, float m_scale, float v_half,
                       const Scalars& scalars, const Arguments& p) {
  float ys[EACH], zs[EACH];
  unpack(ys, m_codes, 0.0f);
  unpack(zs, v_codes, -127.0f);
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const float y = __fmul_rn(ys[j], m_scale), z = __fmul_rn(zs[j], v_half);
    const float g = GUARDED ? __fmul_rn(grad.at(j), scalars.inverse) : grad.at(j);
    const float square = __fmul_rn(z, z);
    const float m =
        __fadd_rn(__fmul_rn(__fmul_rn(y, fabsf(y)), p.beta[0]), __fmul_rn(g, p.share[0]));
    const float v = __fadd_rn(__fmul_rn(__fmul_rn(square, square), p.beta[1]),
                              __fmul_rn(__fmul_rn(g, g), p.share[1]));
    const float s = v < __int_as_float(0x7F800000) ? root_of_any(v) : v;
    const float moved = __fmul_rn(scalars.size, m);
    const float update = __fmul_rn(moved, reciprocal(__fmaf_rn(s, scalars.root, p.eps)));
    const float fresh = __fsub_rn(__fmaf_rn(param[j], -scalars.shrink, param[j]), update);
    param[j] = GUARDED && scalars.failed ? param[j] : fresh;
    const uint32_t sign = __float_as_uint(m) & SIGN;
    roots[0][j] = __uint_as_float(__float_as_uint(root_of_any(fabsf(m))) | sign);
    roots[1][j] = root_of(s);
  }
}

// The largest magnitude of a row's group.
DEVICE uint32_t group_most(const float (&roots)[EACH]) {
  uint32_t most = 0;
#pragma unroll
  for (int j = 0; j < EACH; ++j) most = max(most, magnitude(roots[j]));
  return __reduce_max_sync(ALL, most);
}

// Four codes, 0 where the multiplier is 0.
DEVICE uint32_t first_codes(const float (&roots)[EACH], float multiplier) {
  uint32_t codes[EACH];
#pragma unroll
  for (int j = 0; j < EACH; ++j) codes[j] = code_nearest(__fmul_rn(roots[j], multiplier));
  return multiplier != 0 ? pack(codes[0], codes[1], codes[2], codes[3]) : 0;
}

DEVICE uint32_t second_codes(const float (&roots)[EACH], float multiplier) {
  uint32_t codes[EACH];
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const float units = __fmul_rn(roots[j], multiplier);
    codes[j] = code_nearest(fmaxf(__fmaf_rn(units, 2.0f, -127.0f), -126.0f));
  }
  return multiplier != 0 ? pack(codes[0], codes[1], codes[2], codes[3]) : 0;
}

// Make the step: `param` from the old weights to the new, and the moments' codes and scale anew.
DEVICE void update(float (&param)[ROWS][EACH], Numbers& x, const Scalars& scalars, const Lane& lane,
                   const Arguments& p) {
  const float held = lane.moment() ? 0.5f * x.scale : x.scale;
#pragma unroll
  for (int k0 = 0; k0 < ROWS; k0 += PAIR) {
    float roots[PAIR][2][EACH];
    uint32_t most[PAIR][2];
#pragma unroll
    for (int i = 0; i < PAIR; ++i) {
      const int k = k0 + i;
      const float m_scale = __shfl_sync(ALL, held, k), v_half = __shfl_sync(ALL, held, ROWS + k);
      update_row(param[k], roots[i], x.grad[k], x.codes[0][k], x.codes[1][k], m_scale, v_half,
                 scalars, p);
      most[i][0] = group_most(roots[i][0]);
      most[i][1] = group_most(roots[i][1]);
    }
    const bool odd = lane.index % PAIR;
    const uint32_t firsts = odd ? most[1][0] : most[0][0];
    const uint32_t seconds = odd ? most[1][1] : most[0][1];
    float scale, multiplier;
    block_scale(lane.moment() ? seconds : firsts, scale, multiplier);
    if (lane.scale_row() / PAIR == k0 / PAIR) x.scale = scale;
#pragma unroll
    for (int i = 0; i < PAIR; ++i) {
      const int k = k0 + i;
      x.codes[0][k] = first_codes(roots[i][0], __shfl_sync(ALL, multiplier, k));
      x.codes[1][k] = second_codes(roots[i][1], __shfl_sync(ALL, multiplier, ROWS + k));
    }
  }
}

// Round to bf16, away from zero with the probability of what lies below, as the reference does.
DEVICE void narrow(float (&param)[ROWS][EACH], uint64_t seed, const Lane& lane) {
  const bool odd = lane.index % 2;
#pragma unroll
  for (int k = 0; k < ROWS; k += 2) {
    // Two lanes share the eight numbers of a draw: each makes one row's, and they exchange halves.
    const Words mine = philox(seed, lane.column / 8, lane.row + k + odd);
    uint32_t bits[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t got = __shfl_xor_sync(ALL, odd ? mine.w[i] : mine.w[2 + i], 1);
      bits[0][i] = odd ? got : mine.w[i];
      bits[1][i] = odd ? mine.w[2 + i] : got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        float& x = param[k + i][j];
        const uint32_t drawn = j % 2 ? bits[i][j / 2] >> 16 : bits[i][j / 2] & 0xFFFFu;
        const uint32_t top = __float_as_uint(x) + drawn & 0xFFFF0000u;
        x = __uint_as_float(x == x ? top : 0x7FC00000u);
      }
    }
  }
}

// --- the codes -----------------------------------------------------------------------------------

// The largest of the lanes that have a block's columns.
DEVICE uint32_t sharing_most(uint32_t most) {
  if (SHARING == 32) return __reduce_max_sync(ALL, most);
#pragma unroll
  for (int step = 1; step < SHARING; step *= 2) most = max(most, __shfl_xor_sync(ALL, most, step));
  return most;
}

// Give every block of the cluster what this warp has of the largest of blocks.
DEVICE void give_most(Shared& shared, const float (&param)[ROWS][EACH], const Lane& lane,
                      const Arguments& p) {
  uint32_t most = 0;
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      if (lane.inside(k, j, p)) most = max(most, magnitude(param[k][j]));
    }
  }
  const int block = lane.index % ACROSS, to = lane.index / ACROSS;
  most = __shfl_sync(ALL, sharing_most(most), block * SHARING);
  if (to >= CLUSTER) return;
  uint32_t& place = shared.most[block][lane.rank * WARPS + lane.warp];
  if (CLUSTER > 1) store_at(place, to, most);
  else place = most;
}

DEVICE void store_scale(float scale, const Lane& lane, const Arguments& p) {
  if (lane.rank || lane.warp || lane.index % SHARING || lane.column >= p.n) return;
  const int64_t row = lane.row / BLOCK, column = lane.column / BLOCK;
  if (WRITES_Q) p.scale[row * ceil_div(p.n, BLOCK) + column] = scale;
  if (WRITES_QT) p.scale_t[column * ceil_div(p.m, BLOCK) + row] = scale;
}

// Columns' runs of sixteen codes, two neighbouring threads a sector.
DEVICE void store_columns(const Shared& shared, const Lane& lane, const Arguments& p) {
  constexpr int RUN = 16;
  const int row0 = lane.row - lane.warp * ROWS, column0 = lane.column - lane.index * EACH;
#pragma unroll
  for (int i = threadIdx.x; i < GROUP * SLICE / RUN; i += THREADS) {
    const int within = i / 2 % GROUP, run = i / (2 * GROUP) * 2 + i % 2;
    const int row = row0 + run * RUN, column = column0 + within;
    if (column >= p.n) continue;
    uint32_t words[RUN / TALL];
#pragma unroll
    for (int j = 0; j < RUN / TALL; ++j) words[j] = shared.columns[run * RUN / TALL + j][within];
    uint8_t* to = p.qt + int64_t(column) * p.m + row;
    if (QT_ACCESS == RUN) {
      if (row < p.m) *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
      continue;
    }
#pragma unroll
    for (int j = 0; j < RUN; ++j) {
      if (row + j < p.m) to[j] = uint8_t(words[j / TALL] >> j % TALL * 8);
    }
  }
}

DEVICE void quantise(Shared& shared, const float (&param)[ROWS][EACH], const Lane& lane,
                     const Arguments& p) {
  const uint32_t part = shared.most[lane.index / SHARING][lane.index % PARTS];
  float scale, multiplier;
  block_scale(sharing_most(part), scale, multiplier);
  store_scale(scale, lane, p);
  uint32_t words[ROWS];
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
    words[k] = first_codes(param[k], multiplier);
    const int64_t at = int64_t(lane.row + k) * p.n + lane.column;
    if (WRITES_Q) store(p.q, at, k, words[k], lane, p);
  }
  if (!WRITES_QT) return;
#pragma unroll
  for (int k = 0; k < ROWS; k += TALL) {
    uint32_t columns[EACH];
    transpose(columns, words[k], words[k + 1], words[k + 2], words[k + 3], false);
    uint32_t* to = &shared.columns[(lane.warp * ROWS + k) / TALL][lane.index * EACH];
    *reinterpret_cast<uint4*>(to) = {columns[0], columns[1], columns[2], columns[3]};
  }
  __syncthreads();
  store_columns(shared, lane, p);
}

DEVICE void store_step(const float (&param)[ROWS][EACH], const Numbers& x, const Lane& lane,
                       const Arguments& p) {
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
    const int64_t at = int64_t(lane.row + k) * p.n + lane.column;
    Quad fresh;
#pragma unroll
    for (int i = 0; i < ELEMENT; ++i) {
      fresh.words[i] = ELEMENT == 4 ? __float_as_uint(param[k][i])
                                    : __byte_perm(__float_as_uint(param[k][2 * i]),
                                                  __float_as_uint(param[k][2 * i + 1]), 0x7632);
    }
    store(p.param, at, k, fresh, lane, p);
    store(p.codes[0], at, k, x.codes[0][k], lane, p);
    store(p.codes[1], at, k, x.codes[1][k], lane, p);
  }
  const int row = lane.row + lane.scale_row();
  if (lane.index < 2 * ROWS && row < p.m) *Numbers::scale_at(row, lane, p) = x.scale;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
    cluster(const __grid_constant__ Arguments p) {
  __shared__ __align__(16) Shared shared;
  if (WRITES_CODES) begin_cluster();
  const Lane lane(p);
  Numbers x(lane, p);
  const Scalars scalars(p);  // while numbers are on their way
  float param[ROWS][EACH];
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
#pragma unroll
    for (int j = 0; j < EACH; ++j) param[k][j] = x.param[k].at(j);
  }
  update(param, x, scalars, lane, p);
  if (ELEMENT == 2) narrow(param, scalars.seed, lane);
  if (WRITES_CODES) {
    wait_cluster();  // until all have begun
    give_most(shared, param, lane, p);
    arrive_cluster();
  }
  // While the others' words are on their way.
  if (!scalars.failed) store_step(param, x, lane, p);
  if (!WRITES_CODES) return;
  if (CLUSTER > 1) wait_cluster();
  else __syncthreads();
  quantise(shared, param, lane, p);
}
