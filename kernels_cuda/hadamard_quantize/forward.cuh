// Rounding to 4-bit codes, and writing them: what both forward passes of the quantiser share.
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

// Write the codes of a run as `packed` or `wide` has them, and add up their squares.
DEVICE void write_run(uint8_t* packed, uint8_t* wide, const float (&v)[ELEMENTS], float inverse,
                      int column, int columns, int& squares) {
  uint32_t bytes[ELEMENTS / 4], nibbles[ELEMENTS / 8];
#pragma unroll
  for (int i = 0; i < ELEMENTS / 4; ++i) {
    bytes[i] = bytes_of(&v[4 * i], inverse);
    squares = __dp4a(int(bytes[i]), int(bytes[i]), squares);
  }
#pragma unroll
  for (int i = 0; i < ELEMENTS / 8; ++i) {
    nibbles[i] = nibbles_of(bytes[2 * i], bytes[2 * i + 1]);
  }
  if (PACKED) store<4, PACKED_BYTES>(packed, nibbles, column, columns);
#pragma unroll
  for (int i = 0; i < ELEMENTS / 4; ++i) bytes[i] = bytes[i] << 4 & 0xF0F0F0F0u;
  if (WIDE) store<8, WIDE_BYTES>(wide, bytes, column, columns);
}
