// The interleaved schedule of block_gemm.cuh's products: telescoped sums of two kinds take blocks of K
// in turn, so that the tensor cores multiply into one while the other is promoted. Σ s_b·(S_b − S_{b−2})
// over every second block is Σ (s_b − s_{b+2})·S_b, as of one sum over all of them.
#pragma once

#include "block_gemm.cuh"

constexpr int CHAINS = INTERLEAVED ? 2 : 1;  // sums that take steps in turn

// What Multiplier is to the other schedules.
struct Interleaved {
  float acc[1][SUMS];
  int sums[2][SUMS];
  uint32_t rank;
  Slot slot;
  uint32_t a, b;           // the first slot's operands, as descriptors have them
  const float* factor_at;  // and its factors
  Turns turns;

  DEVICE Interleaved(int group, uint32_t rank)
      : rank(rank),
        a(wgmma_address(slot.a() + group * 64 * TILE_K)),
        b(wgmma_address(slot.b())),
        factor_at(factors(slot) + group * (64 / SCALE_ROWS) * FACTOR_PITCH),
        turns(group) {}

  // Have the tensor cores multiply the slot, once it is full.
  DEVICE void issue(int chain) {
    barrier_wait(slot.full(), slot.parity);
    const uint32_t a_at = a + slot.index * (A_BYTES / 16), b_at = b + slot.index * (B_BYTES / 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < TILE_K / 16; k += 2) {
      wgmma(sums[chain], wgmma_descriptor(a_at + k), wgmma_descriptor(b_at + k), true);
    }
    wgmma_commit();
  }

  DEVICE void read_factors(float (&to)[FACTORS], const Slot& from, int table) const {
#pragma unroll
    for (int i = 0; i < FACTORS; ++i) {
      to[i] = factor_at[from.index * FACTOR_FLOATS + table * FACTOR_TABLE + i];
    }
  }

  // Promote the sums of a slot, since which PENDING products have been issued.
  template <int PENDING>
  DEVICE void promote(int chain, const Slot& from) {
    float factor[FACTORS];
    read_factors(factor, from, 0);
    wgmma_wait<PENDING>();
    from.release(rank);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
      acc[0][i] = __fmaf_rn(factor[i / 4 * 8 / SCALE_COLUMNS], __int_as_float(sums[chain][i]),
                            acc[0][i]);
    }
  }

  // Promote the last step, and free the sums of the factors' power of two.
  DEVICE void end(int chain) {
    float correction[FACTORS], sink[FACTORS];
    read_factors(correction, slot, 1);
    read_factors(sink, slot, 2);
    promote<0>(chain, slot);
    slot.next();
#pragma unroll
    for (int i = 0; i < FACTORS; ++i) correction[i] *= sink[i];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
      const int at = i / 4 * 8 / SCALE_COLUMNS;
      acc[0][i] = __fmaf_rn(acc[0][i], sink[at], correction[at]);
    }
  }

  // Promote a step of one chain while the next, of the other, is multiplied.
  DEVICE void advance(int chain, bool window_end) {
    const Slot from = slot;
    slot.next();
    issue(1 - chain);
    float correction[FACTORS];
    if (chain && window_end) read_factors(correction, from, 1);
    promote<1>(chain, from);
    if (!window_end) return;
    start_at_base(sums[chain]);
    if (!chain) return;
    // Take off what the base has added.
#pragma unroll
    for (int i = 0; i < SUMS; ++i) acc[0][i] += correction[i / 4 * 8 / SCALE_COLUMNS];
  }

  DEVICE void tile(int steps) {
    start_at_base(sums[0]);
    issue(0);
    start_at_base(sums[1]);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) acc[0][i] = 0.0f;
    int step = 0;
    // ptxas has the products wait for each other where a loop is left within, or where the last two
    // steps have a branch each.
    for (; step < steps - 2; step += 2) {
      const bool window_end = step % (2 * WINDOW) == 2 * (WINDOW - 1);
      advance(0, window_end);
      advance(1, window_end);
    }
    if (step == steps - 2) {
      advance(0, false);
      end(1);
    } else {
      end(0);
    }
  }
};
