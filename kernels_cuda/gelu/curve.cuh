// GELU and its derivative at s·a and −s·a, a ≥ 0, for the codes of a block of scale s.
//
// Both ends of a pair share the exponential: σ(−z) = e·σ(z) with e = exp(−z), and gelu'(−x) is
// 1 − gelu'(x). What jetfire.kernels_triton.gelu says of the formulas and their fits holds here.
#pragma once

#include "code_tables.cuh"
#include "config.cuh"

// 2·√(2/π)·(x + 0.044715·x³) = LINEAR·x + CUBIC·x³
constexpr float LINEAR = 1.5957691216057308f, CUBIC = 0.07135481282652825f;
constexpr float DENSITY = 0.3989422804014327f;  // 1/√(2π)
// No |gelu(x)| is as large for any x below 0: the largest is 0.17004.
constexpr float DIP = 0.1701f;
constexpr float AT_ZERO = BACKWARD ? 0.5f : 0.0f;

// A block's curve: gelu(s·q)/s, or gelu'(s·q) if BACKWARD.
struct Curve {
  float s, linear, cubic;

  // A scale beyond 1000 gives what 1000 does, 0 or x; its cube might overflow.
  DEVICE explicit Curve(float scale) : s(fminf(scale, 1e3f)) {
    linear = s * (ERF ? -0.5f * LOG2E * s : -LINEAR * LOG2E);
    cubic = s * s * s * (-CUBIC * LOG2E);
  }

  DEVICE Pair operator()(float a) const { return ERF ? of_erf(a) : of_tanh(a); }

 private:
  DEVICE Pair of_tanh(float a) const {
    const float square = a * a;
    const float e = exp2_fast(a * __fmaf_rn(square, cubic, linear));
    const float gate = reciprocal_fast(1.0f + e);
    if constexpr (!BACKWARD) {
      const float plus = a * gate;
      return {plus, -plus * e};
    }
    const float rise = a * __fmaf_rn(square, s * s * s * (3.0f * CUBIC), s * LINEAR);  // x·dz/dx
    const float minus = e * gate * __fmaf_rn(-gate, rise, 1.0f);
    return {1.0f - minus, minus};
  }

  DEVICE Pair of_erf(float a) const {
    const float e = exp2_fast(a * a * linear);
    const float t = reciprocal_fast(__fmaf_rn(a, 0.305f * s, 1.0f));
    float fit = __fmaf_rn(t, -0.07748840215672662f, 0.20335613014840473f);
    fit = __fmaf_rn(fit, t, -0.005865353132378175f);
    fit = __fmaf_rn(fit, t, 0.1415490133948043f);
    fit = __fmaf_rn(fit, t, 0.11641860673209659f);
    fit = __fmaf_rn(fit, t, 0.1220300711472435f);
    const float tail = fit * t;  // Φ(−x)·exp(x²/2)
    if constexpr (!BACKWARD) {
      const float lost = e * tail;
      return {__fmaf_rn(-a, lost, a), -a * lost};
    }
    const float minus = e * __fmaf_rn(a, s * -DENSITY, tail);
    return {1.0f - minus, minus};
  }
};
