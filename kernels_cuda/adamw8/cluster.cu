// AdamW with INT8 moments, and the new weight's codes, in one pass.
#include "adamw_cluster.cuh"

constexpr int PAIR = 2;  // rows whose groups have their scales made at once

// Of its warp's 2·ROWS groups a lane makes the scale of one: of which moment and which row.
DEVICE int moment_of(const Lane& lane) { return lane.index / ROWS % 2; }
DEVICE int scale_row(const Lane& lane) { return lane.index % ROWS; }

DEVICE float* scale_of(const Lane& lane, const Arguments& p) {
  float* scales = moment_of(lane) ? p.scales[1] : p.scales[0];
  return scales + int64_t(lane.row + scale_row(lane)) * ceil_div(p.n, GROUP) + lane.column / GROUP;
}

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
  unpack(ys, *reinterpret_cast<const Codes*>(shared.moments[0] + codes_place), 0.0f);
  unpack(zs, *reinterpret_cast<const Codes*>(shared.moments[1] + codes_place), -127.0f);
  uint32_t most[2] = {};
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const float y = __fmul_rn(ys[j], m_scale), z = __fmul_rn(zs[j], v_half);
    const float g = GUARDED ? __fmul_rn(grad.at(j), scalars.inverse) : grad.at(j);
    const float square = __fmul_rn(z, z);
    const float m =
        __fadd_rn(__fmul_rn(__fmul_rn(y, fabsf(y)), p.beta[0]), __fmul_rn(g, p.share[0]));
    float v = __fadd_rn(__fmul_rn(__fmul_rn(square, square), p.beta[1]),
                        __fmul_rn(__fmul_rn(g, g), p.share[1]));
    if (!lane.inside(k, j, p)) v = 0;  // where a code of 0 stands for no 0
    const float s = full_root_of(v);
    param[j] = stepped(old.at(j), m, s, scalars, p);
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
  block_scale(moment_of(lane) ? seconds : firsts, scale, multiplier);
#pragma unroll
  for (int i = 0; i < PAIR; ++i) {
    const float first = __shfl_sync(ALL, multiplier, k + i);
    const float second = __shfl_sync(ALL, multiplier, ROWS + k + i);
    if (GUARDED && scalars.failed) continue;
    store_weights(param[k + i], k + i, lane, p);
    store(p.moments[0], Codes{codes_of(roots[i].of[0], first)}, k + i, lane, p);
    store(p.moments[1], Codes{second_codes_of(roots[i].of[1], second)}, k + i, lane, p);
  }
  return scale;
}

// --- all of it -----------------------------------------------------------------------------------

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
    cluster(const __grid_constant__ Arguments p) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Lane lane(p);
  begin(shared);
  load(shared, lane, p);
  const bool within = EVEN || lane.row + scale_row(lane) < p.m;
  const float scale = within ? *scale_of(lane, p) : 0.0f;
  const float held = moment_of(lane) ? 0.5f * scale : scale;
  const Scalars scalars(p);  // while the slice is on its way
  if (TMA) barrier_wait(shared_address(&shared.arrived), 0);
  float param[ROWS][EACH], fresh = 0;
#pragma unroll
  for (int k = 0; k < ROWS; k += PAIR) {
    const float found = update(param, shared, k, held, scalars, lane, p);
    if (scale_row(lane) / PAIR == k / PAIR) fresh = found;
  }
  if (within && lane.index < 2 * ROWS && !scalars.failed) *scale_of(lane, p) = fresh;
  write_codes(shared, param, lane, p);
}
