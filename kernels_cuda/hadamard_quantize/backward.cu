// The quantiser's gradient: what passes of the codes' gradient, transformed back; and, of the step,
// the sum over each row. As jetfire.reference's input_gradient and step_terms have it.
#include "transform.cuh"

struct Arguments {
  const uint8_t* dx_hat;
  const uint8_t* given;  // packed codes, or x
  const float* step;
  const int32_t* slots;
  const float* unit;
  uint8_t* dx;
  float* dstep;
  int64_t pitch, given_pitch;  // bytes from row to row of dx_hat and of what is given
  int64_t slots_stride;
  int32_t m, n;
};

constexpr int G_BITS = bits_of(G_TYPE), DX_BITS = bits_of(DX_TYPE);
constexpr int GIVEN_BITS = GIVEN_X ? bits_of(X_TYPE) : 4;
constexpr int PARTS = GATHERED ? 2 : 1;

// A row's parts of dx_hat, up to the column where each ends: 0 for one that is not there.
struct Source {
  const uint8_t* row[PARTS];
  int columns[PARTS];
  float missing;  // what the parts that are not there add: 0, or NaN
};

DEVICE Source source_of(const Arguments& p, int64_t row, int columns) {
  Source source = {{p.dx_hat + row * p.pitch}, {columns}, 0.0f};
  if constexpr (GATHERED) {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      const int slot = columns ? p.slots[row * p.slots_stride + i] : -1;
      source.row[i] = p.dx_hat + slot * p.pitch;
      source.columns[i] = slot < 0 ? 0 : columns;
      if (slot < 0) source.missing = __fmul_rn(0.0f, *p.unit);
    }
  }
  return source;
}

struct Tile {
  Raw<G_BITS> parts[PARTS];
  Raw<GIVEN_BITS> given;
};

DEVICE void load_tile(Tile& tile, const Source& source, const uint8_t* given, int column,
                      int columns) {
  load<GIVEN_BITS, GIVEN_BYTES>(tile.given, given, column, columns);
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    load<G_BITS, G_BYTES>(tile.parts[i], source.row[i], column, source.columns[i]);
  }
}

DEVICE float gradient_of(const Tile& tile, const Source& source, int c, int j) {
  const float first = unpack<G_TYPE>(tile.parts[0][c], j);
  if constexpr (!GATHERED) return first;
  const float second = unpack<G_TYPE>(tile.parts[PARTS - 1][c], j);
  return __fadd_rn(__fadd_rn(first, second), source.missing);
}

// Bit 2 of each nibble that is −8 or 7, whose three lower bits are alike and unlike its highest.
DEVICE uint32_t clipped(uint32_t codes) {
  const uint32_t differ = codes ^ codes >> 1;
  return differ & ~(differ << 1) & ~(differ << 2) & 0x44444444u;
}

// The gradient where it passes, else 0.
DEVICE void mask_by_codes(Values& v, const Tile& tile, const Source& source) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < ELEMENTS / 8; ++i) {
      uint32_t edges = 0;
      if constexpr (!GIVEN_X) edges = clipped(tile.given[c][i]);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float g = gradient_of(tile, source, c, 8 * i + j);
        v[c][8 * i + j] = edges & 4u << 4 * j ? 0.0f : g;
      }
    }
  }
}

// The same from x, and what the tile adds to the step's gradient.
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
