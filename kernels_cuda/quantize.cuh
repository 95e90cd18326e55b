// Block quantisation and its random bits, as jetfire.reference.quantize and .philox.
#pragma once

#include "ptx.cuh"

// a/b for a reciprocal of b that errs by some units in the last place, rounded once: what is left
// of the first quotient corrects it. Right for a/127 with amax as below and for 127/b, b in [1, 2),
// at every mantissa and with reciprocals up to four units off.
DEVICE float quotient(float a, float b, float reciprocal) {
  const float first = __fmul_rn(a, reciprocal);
  return __fmaf_rn(__fmaf_rn(-b, first, a), reciprocal, first);
}

// Scale and multiplier of a block: amax/127 and 127/amax; 0 and 0 below 2^-100, NaN and 0 for
// amax = NaN or infinity. `amax` is the float's bits, which order like the floats and NaN above all.
// Without the branches of division, whose cases of overflow and underflow cannot arise: amax is
// divided by as m·2^e, m in [1, 2), and the exponent subtracted.
DEVICE void block_scale(uint32_t amax, float& scale, float& multiplier) {
  constexpr uint32_t TINY = 27u << 23, INFINITE = 255u << 23;  // the bits of 2^-100 and infinity
  const float m = __uint_as_float((amax & 0x007FFFFF) | 127u << 23);
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(m));
  y = __fmaf_rn(y, __fmaf_rn(-m, y, 1.0f), y);
  const uint32_t power = amax - __float_as_uint(m);
  const uint32_t by = __float_as_uint(quotient(127.0f, m, y)) - power;
  const bool usable = amax >= TINY && amax < INFINITE;
  scale = quotient(__uint_as_float(amax), 127.0f, 1.0f / 127.0f);
  scale = usable ? scale : amax < TINY ? 0.0f : __int_as_float(0x7FC00000);
  multiplier = usable ? __uint_as_float(by) : 0.0f;
}

// Codes come as the low byte of a float: adding 1.5·2^23 leaves an integer in a float's low bits,
// rounded as the addition rounds. One instruction where a conversion is a slower one and a byte's
// extraction another.
constexpr float INTEGER = 12582912.0f;

DEVICE uint32_t code_nearest(float product) {
  return __float_as_uint(__fadd_rn(product, INTEGER));
}

// From sm_86 on one instruction rounds two products to nearest, NaN to 0, as bytes 0 and 1.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
constexpr bool CONVERTS_PAIRS = true;
#else
constexpr bool CONVERTS_PAIRS = false;
#endif

DEVICE uint32_t codes_nearest(float low, float high) {
  uint32_t codes;
  asm("{\n.reg .s32 a, b;\ncvt.rni.s32.f32 a, %1;\ncvt.rni.s32.f32 b, %2;\n"
      "cvt.pack.sat.s8.s32.b32 %0, b, a, 0;\n}"
      : "=r"(codes) : "f"(low), "f"(high));
  return codes;
}

// `word`: sixteen random bits in its low or high half. A float of the bits 8…23 counts 2^-141, so
// that one FMA adds bits/2^16 to the product and rounds once. The product is no less than -127.
DEVICE uint32_t code_stochastic(float product, uint32_t word, bool high) {
  const float bits = __uint_as_float(__byte_perm(word, 0, high ? 0x4324 : 0x4104));
  return __float_as_uint(__fadd_rd(__fmaf_rn(bits, 0x1p125f, product), INTEGER));
}

// Whether products of a block's elements may round to more than 127: of which the negative ones
// would floor to -128.
DEVICE bool exceeds(uint32_t amax, float multiplier) {
  return __fmul_rn(__uint_as_float(amax), multiplier) > 127.0f;
}

DEVICE float max_nan(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

struct Words {
  uint32_t w[4];
};

// Both words of a product, as two registers: of a shifted 64-bit one ptxas copies the high word, an
// instruction more for most products.
DEVICE void multiply_wide(uint32_t a, uint32_t b, uint32_t& low, uint32_t& high) {
  asm("{\n.reg .b64 product;\nmul.wide.u32 product, %2, %3;\nmov.b64 {%0, %1}, product;\n}"
      : "=r"(low), "=r"(high) : "r"(a), "r"(b));
}

// Philox 4x32-7 at counters (c0, c1, 0, 0): the rounding bits of eight neighbours in a row.
DEVICE Words philox(uint64_t seed, uint32_t c0, uint32_t c1) {
  uint32_t c2 = 0, c3 = 0, k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    uint32_t low0, high0, low1, high1;
    multiply_wide(c0, 0xD2511F53u, low0, high0);
    multiply_wide(c2, 0xCD9E8D57u, low1, high1);
    c0 = high1 ^ c1 ^ k0;
    c2 = high0 ^ c3 ^ k1;
    c1 = low1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Among four neighbouring lanes: lane i's word j becomes lane j's word i.
DEVICE void transpose_words(Words& x) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool high = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      uint32_t& a = x.w[i];
      uint32_t& b = x.w[i + step];
      const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, high ? a : b, step);
      if (high) a = got; else b = got;
    }
  }
}
