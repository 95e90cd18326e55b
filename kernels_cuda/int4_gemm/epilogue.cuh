// From int32 sums of codes to the output: scales, a row's weight, a bias. What it may be, and how
// INT8 codes are made of it, is in block_epilogue.cuh.
#pragma once

#include "block_epilogue.cuh"

enum Product { FWD, DGRAD, WGRAD };

struct Epilogue {
  const float *a_scale, *b_scale, *bias, *weight;
  const int* counts;  // of kept rows: the end of the high parts, and of all
  void* c;  // or its codes
  int m, n;
};

// Where codes and their scales go.
DEVICE Target target_of(const Epilogue& to, float* scale) {
  int8_t* const q = static_cast<int8_t*>(to.c);
  return {nullptr, to.bias, q, scale, nullptr, nullptr, nullptr, to.m, to.n};
}

// Rows of the output that are wanted.
DEVICE int rows_of(const Epilogue& to) { return PRODUCT == DGRAD ? min(to.counts[1], to.m) : to.m; }

DEVICE float scale_of(const Epilogue& to) { return __fmul_rn(*to.a_scale, *to.b_scale); }

DEVICE float weight_of(const Epilogue& to, int row) {
  return PRODUCT == DGRAD && row < to.m ? to.weight[row] : 1.0f;
}

// Codes in the high halves of bytes are sixteen times themselves.
constexpr float CODE_UNIT = SHIFTED ? 0x1p-8f : 1.0f;
constexpr int HIGH = 14;  // what a high part weighs, in low ones

DEVICE float scaled(int sum, float scale) {
  return __fmul_rn(CODE_UNIT * __int2float_rn(sum), scale);
}

// A sum as it is stored.
DEVICE float finished(int sum, const Epilogue& to, float scale, float weight, int column) {
  float x = scaled(sum, scale);
  if (PRODUCT == DGRAD) x = __fmul_rn(x, weight);
  if (BIAS) x = __fadd_rn(x, column < to.n ? to.bias[column] : 0.0f);
  return x;
}
