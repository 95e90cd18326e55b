// Bit splitting of codes, as jetfire.reference.bit_split_codes has it to the bit, and their column
// sums on the way.
//
// A warp has ROWS rows of CHUNK columns, of one row of blocks; a block of the grid DOWN·ROWS whole
// rows. Column sums are integers in units of 2^-31 of the parts' unit, so that no order counts: of
// each warp in shared memory, then of all in memory.
#include "arguments.cuh"

constexpr uint32_t ALL = 0xFFFFFFFFu;
constexpr int EACH = 16, CHUNK = 32 * EACH;  // neighbouring codes of a lane, and of a warp
constexpr int THREADS = 32 * WARPS, DOWN = WARPS / ACROSS, HEIGHT = DOWN * ROWS;
constexpr int PARTS = BITS == 8 ? 2 : 1;
constexpr int AHEAD = ROWS < 4 ? ROWS : 4;  // rows that are loaded together
static_assert(ROWS <= BLOCK && ROWS <= 256, "one row of blocks, whose sums fit in 16 bits");

struct Shared {
  int64_t sums[DOWN][ACROSS * CHUNK];
  int32_t squares[PARTS][HEIGHT];
  bool last;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "as the host counts them");

extern __shared__ __align__(16) uint8_t memory[];

using Raw = uint32_t[EACH / 4];  // a lane's codes of a row

DEVICE void load(Raw& to, const uint8_t* row, int column, int columns) {
#pragma unroll
  for (int i = 0; i < EACH / 4; ++i) to[i] = 0;
  if (VECTORS) {
    if (column >= columns) return;
    const uint4 x = __ldg(reinterpret_cast<const uint4*>(row + column));
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    return;
  }
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    if (column + j < columns) to[j / 4] |= uint32_t(__ldg(row + column + j)) << j % 4 * 8;
  }
}

// Of a lane's packed codes of a row.
DEVICE void store(uint8_t* row, const uint32_t (&codes)[EACH / 8], int column, int columns) {
  uint8_t* to = row + column / 2;
  if (VECTORS) {
    if (column < columns) *reinterpret_cast<uint2*>(to) = {codes[0], codes[1]};
    return;
  }
#pragma unroll
  for (int j = 0; j < EACH; j += 2) {
    if (column + j < columns) to[j / 2] = uint8_t(codes[j / 8] >> j % 8 * 4);
  }
}

// The low bytes of four words.
DEVICE uint32_t bytes(const uint32_t* k) {
  return __byte_perm(__byte_perm(k[0], k[2], 0x0040), __byte_perm(k[4], k[6], 0x0040), 0x5410);
}

// Pack eight codes, the low bytes of words, and add their squares.
DEVICE uint32_t packed(const uint32_t (&k)[8], int& squares) {
  const uint32_t even = bytes(k), odd = bytes(k + 1);
  squares = __dp4a(int(even), int(even), squares);
  squares = __dp4a(int(odd), int(odd), squares);
  return (even & 0x0F0F0F0Fu) | (odd << 4 & 0xF0F0F0F0u);
}

// Codes plus 128, in units of the parts: v = code·ratio, rounded once. A byte below the bits of
// 2^23 makes a float of it.
DEVICE void values(float (&v)[8], const uint32_t* biased, float ratio) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint32_t bits = __byte_perm(biased[j / 4], 0x4B000000u, 0x7440 | j % 4);
    v[j] = __fmul_rn(__fsub_rn(__uint_as_float(bits), 8388736.0f), ratio);
  }
}

// hi = rint(v/14) and lo = floor(v − 14·hi + u), as low bytes. Sixteen bits under the exponent of
// 128 are 128 + u, and rounding down onto 1.5·2^23 − 128 leaves lo there.
DEVICE void split(uint32_t (&high)[8], uint32_t (&low)[8], const float (&v)[8], const Words& words) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float h = __fmaf_rn(v[j], __uint_as_float(0x3D924925u), INTEGER);
    const uint32_t draw = __byte_perm(words.w[j / 2], 0x4300u, j % 2 ? 0x5432 : 0x5410);
    const float rest = __fmaf_rn(__fsub_rn(h, INTEGER), -14.0f, __uint_as_float(draw));
    high[j] = __float_as_uint(h);
    low[j] = __float_as_uint(__fadd_rd(__fadd_rn(v[j], rest), INTEGER - 128.0f));
  }
}

// What all rows share.
struct Common {
  float unit, inverse;
  uint64_t seed;

  // In its body, which nvcc does not show the host's compiler: that one knows no __fdiv_rn.
  DEVICE explicit Common(const Arguments& p) {
    unit = *p.unit;
    inverse = unit > 0 ? __fdiv_rn(1.0f, unit) : 0.0f;
    seed = BITS == 8 ? *p.seed : 0;
  }
  // Of codes of a scale. Where the unit is 0 or NaN, all are 0.
  DEVICE float ratio(float scale) const { return unit > 0 ? __fmul_rn(scale, inverse) : 0.0f; }
};

// Write the codes of a lane's part of a row, and return Σ codes² of each part.
DEVICE void put(int (&squares)[PARTS], const Raw& biased, float ratio, int row, int column,
                const Common& common, const Arguments& p) {
  uint32_t parts[PARTS][EACH / 8];
#pragma unroll
  for (int i = 0; i < PARTS; ++i) squares[i] = 0;
#pragma unroll
  for (int i = 0; i < EACH / 8; ++i) {
    float v[8];
    values(v, &biased[2 * i], ratio);
    uint32_t high[8], low[8];
    if constexpr (BITS == 8) {
      split(high, low, v, philox(common.seed, column / 8 + i, row));
      parts[PARTS - 1][i] = packed(low, squares[PARTS - 1]);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) high[j] = code_nearest(v[j]);
    }
    // A unit that is NaN is made known by a code of a row that is thereby kept.
    if (i == 0 && common.unit != common.unit && row == 0 && column == 0) high[0] = 1;
    parts[0][i] = packed(high, squares[0]);
  }
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    store(p.parts + (int64_t(i) * p.m + row) * (p.n / 2), parts[i], column, p.n);
  }
}

// Codes plus 128 of a lane's columns, added up two to a word: of each four even ones, then odd ones.
using Counts = uint32_t[EACH / 2];

DEVICE void count(Counts& counts, const Raw& biased) {
#pragma unroll
  for (int i = 0; i < EACH / 4; ++i) {
    counts[2 * i] += biased[i] & 0x00FF00FFu;
    counts[2 * i + 1] += __byte_perm(biased[i], 0, 0x4341);
  }
}

// Split a warp's rows of a lane's columns; `down`: which warp of those below each other.
DEVICE void split_rows(Counts& counts, Shared& shared, float ratio, int down, int row0, int column,
                       const Common& common, const Arguments& p) {
#pragma unroll 1
  for (int k = 0; k < ROWS; k += AHEAD) {
    Raw raw[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int row = row0 + k + i;
      load(raw[i], p.q + row * p.pitch, column, row < p.m ? p.n : 0);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
#pragma unroll
      for (int j = 0; j < EACH / 4; ++j) raw[i][j] ^= 0x80808080u;
      if (SUMS) count(counts, raw[i]);
      if (row0 + k + i >= p.m) continue;
      int squares[PARTS];
      put(squares, raw[i], ratio, row0 + k + i, column, common, p);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const int sum = __reduce_add_sync(ALL, squares[part]);
        if (threadIdx.x % 32 == 0) atomicAdd(&shared.squares[part][down * ROWS + k + i], sum);
      }
    }
  }
}

// Where shared memory has the sum of a warp's column: two lanes' never lie in one bank.
DEVICE int place(int column) { return column ^ column / EACH % EACH; }

DEVICE void leave_sums(int64_t* to, const Counts& counts, float ratio) {
  const int lane = threadIdx.x % 32, fixed = __float2int_rn(ratio * 0x1p31f);
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const uint32_t word = counts[j / 4 * 2 + j % 2];
    const int sum = int(j % 4 < 2 ? word & 0xFFFF : word >> 16) - 128 * ROWS;
    to[place(lane * EACH + j)] = int64_t(sum) * fixed;
  }
}

// Add what warps below each other have of columns from `first` on to the totals.
DEVICE void add_sums(const Shared& shared, int first, const Arguments& p) {
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < ACROSS * CHUNK && first + i < p.n; i += THREADS) {
    int64_t sum = 0;
#pragma unroll
    for (int k = 0; k < DOWN; ++k) sum += shared.sums[k][i / CHUNK * CHUNK + place(i % CHUNK)];
    atomicAdd(reinterpret_cast<unsigned long long*>(&p.totals[first + i]),
              static_cast<unsigned long long>(sum));
  }
  __syncthreads();
}

// The last block to add its sums makes floats of all.
DEVICE void finish_sums(Shared& shared, float unit, const Arguments& p) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    auto* arrived = reinterpret_cast<unsigned long long*>(&p.totals[p.n]);
    shared.last = atomicAdd(arrived, 1ull) == gridDim.x - 1;
  }
  __syncthreads();
  if (!shared.last) return;
  __threadfence();
#pragma unroll 1
  for (int j = threadIdx.x; j < p.n; j += THREADS) {
    p.sums[j] = float(__dmul_rn(double(__ldcg(&p.totals[j])) * 0x1p-31, double(unit)));
  }
}

// As many threads to an SM as registers do for; codes that lie anywhere take more.
extern "C" __global__ void __launch_bounds__(THREADS, (VECTORS ? 768 : 512) / THREADS)
    rows(const Arguments p) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, down = warp / ACROSS;
  const int row0 = blockIdx.x * HEIGHT + down * ROWS;
  int32_t* squares_of_rows = shared.squares[0];
  for (int i = threadIdx.x; i < PARTS * HEIGHT; i += THREADS) squares_of_rows[i] = 0;
  __syncthreads();
  const Common common(p);
#pragma unroll 1
  for (int first = 0; first < p.n; first += ACROSS * CHUNK) {
    const int start = warp % ACROSS * CHUNK, column = first + start + lane * EACH;
    const bool inside = row0 < p.m && column < p.n;
    const float* scale = p.scale + row0 / BLOCK * p.scale_pitch + column / BLOCK;
    const float ratio = common.ratio(inside ? *scale : 0.0f);
    Counts counts = {};
    split_rows(counts, shared, ratio, down, row0, column, common, p);
    if (SUMS) {
      leave_sums(shared.sums[down] + start, counts, ratio);
      add_sums(shared, first, p);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < PARTS * HEIGHT; i += THREADS) {
    const int row = blockIdx.x * HEIGHT + i % HEIGHT;
    if (row < p.m) p.squares[int64_t(i / HEIGHT) * p.m + row] = squares_of_rows[i];
  }
  if (SUMS) finish_sums(shared, common.unit, p);
}
