// The quantiser's gradient: what passes of the codes' gradient, transformed back; and, of the step,
// the sum over each row. As jetfire.reference's input_gradient and step_terms have it.
#include "gradient.cuh"

struct Arguments {
  const uint8_t* dx_hat;
  const uint8_t* given;  // codes, packed or wide, or x
  const float* step;
  const int32_t* slots;
  const float* unit;
  uint8_t* dx;
  float* dstep;
  int64_t pitch, given_pitch;  // bytes from row to row of dx_hat and of what is given
  int64_t slots_stride;
  int32_t m, n;
};

// The gradient where it passes, else 0, from x; and what the tile adds to the step's gradient.
DEVICE float mask_by_values(Values& v, const Tile& tile, const Source& source, int lane,
                            float inverse) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int j = 0; j < ELEMENTS; ++j) {
      if constexpr (GIVEN_X) v[c][j] = unpack<X_TYPE>(tile.given[c], j);
    }
  }
  butterflies(v, lane);
  float sum = 0;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int j = 0; j < ELEMENTS; ++j) {
      const float exact = __fmul_rn(v[c][j], inverse), q = code(exact) - INTEGER;
      const bool inside = q > -8.0f && q < 7.0f;
      const float g = gradient_of(tile, source, c, j);
      sum = fmaf(g, inside ? q - exact : q, sum);
      v[c][j] = inside ? g : 0.0f;
    }
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) backward(const Arguments p) {
  const int lane = threadIdx.x % LANES;
  const int64_t row = int64_t(blockIdx.x) * ROWS + threadIdx.x / LANES;
  const int columns = row < p.m ? p.n : 0;
  const Source source = source_of(p, row, columns);
  const uint8_t* given = p.given + row * p.given_pitch;
  uint8_t* dx = p.dx + row * p.n * (DX_BITS / 8);
  const float inverse = GIVEN_X ? multiplier(*p.step) : 0.0f;
  float dstep = 0;

  Tile tile;
  int column = lane * ELEMENTS;
  if (PREFETCH) load_tile(tile, source, given, column, columns);
#pragma unroll 1
  for (int start = 0; start < p.n; start += TILE, column += TILE) {
    if (!PREFETCH) load_tile(tile, source, given, column, columns);
    Values v;
    if constexpr (GIVEN_X) {
      dstep += mask_by_values(v, tile, source, lane, inverse);
    } else {
      mask_by_codes(v, tile, source);
    }
    if (PREFETCH) load_tile(tile, source, given, column + TILE, columns);
    butterflies(v, lane);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
      for (int j = 0; j < ELEMENTS; ++j) {
        v[c][j] = __fmul_rn(v[c][j], __int_as_float(FACTOR_BITS));
      }
      uint32_t words[ELEMENTS * DX_BITS / 32];
      pack<DX_TYPE>(words, v[c]);
      store<DX_BITS, DX_BYTES>(dx, words, column + c * RUN, columns);
    }
  }

  if constexpr (GIVEN_X) {
    dstep = sum_of_row(dstep);
    if (lane == 0 && row < p.m) p.dstep[row] = dstep;
  }
}
