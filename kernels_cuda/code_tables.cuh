// Tables over the 256 codes of a block that has one scale, in place of a formula at each element:
// of floats, 0 midway, one per warp in shared memory.
#pragma once

#include "tiles.cuh"

constexpr float LOG2E = 1.4426950408889634f;
constexpr int FLOAT_TABLE = 4 * (256 + 4);  // bytes

struct Pair {
  float plus, minus;  // at codes a and −a
};

DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float finite_or_zero(float scale) { return fabsf(scale) <= LARGEST ? scale : 0.0f; }

DEVICE float* middle_of(uint8_t* table) {
  return reinterpret_cast<float*>(table + FLOAT_TABLE / 2);
}

struct TableLane : Lane {
  int middle;  // of the warp's table: its address in shared memory
  // `table`: not by `warp`, as what all lanes have in common would be copied for each use.
  DEVICE explicit TableLane(const uint8_t* table)
      : middle(shared_address(table) + FLOAT_TABLE / 2) {}

  // What the table has for the j-th of eight codes. A dot product with one of a word's bytes adds
  // four times the code to the address.
  DEVICE float look_up(uint2 codes, int j) const {
    const int word = j < 4 ? codes.x : codes.y;
    return load_shared_float(__dp4a(word, 4 << j % 4 * 8, middle));
  }
};

// Make all of a table but its middle, by the warp that has it.
template <class Curve>
DEVICE void tabulate(uint8_t* table, const Curve& curve, const Lane& lane) {
  float* middle = middle_of(table);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int a = lane.index + 1 + 32 * j;
    const Pair pair = curve(float(a));
    middle[a] = pair.plus;
    middle[-a] = pair.minus;
  }
}
