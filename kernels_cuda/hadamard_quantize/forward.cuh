// Rounding to 4-bit codes: what both forward passes of the quantiser share.
#pragma once

#include "transform.cuh"

// The low bytes of four codes.
DEVICE uint32_t bytes_of(const float* v, float inverse) {
  uint32_t k[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) k[i] = __float_as_uint(code(__fmul_rn(v[i], inverse)));
  return __byte_perm(__byte_perm(k[0], k[1], 0x0040), __byte_perm(k[2], k[3], 0x0040), 0x5410);
}

// The low nibbles of eight bytes, the first lowest.
DEVICE uint32_t nibbles_of(uint32_t low, uint32_t high) {
  const uint32_t a = (low & 0x0F0F0F0Fu) | (low >> 4 & 0xF0F0F0F0u);
  const uint32_t b = (high & 0x0F0F0F0Fu) | (high >> 4 & 0xF0F0F0F0u);
  return __byte_perm(a, b, 0x6420);  // each pair is in its first byte
}
