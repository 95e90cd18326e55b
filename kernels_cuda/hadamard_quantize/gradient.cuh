// What passes of the codes' gradient, a tile at a time: what both forms of the quantiser's gradient
// begin with.
#pragma once

#include "hadamard_rows.cuh"

constexpr int G_BITS = bits_of(G_TYPE), DX_BITS = bits_of(DX_TYPE);
constexpr int PARTS = GATHERED ? 2 : 1;

// A row's parts of dx_hat, up to the column where each ends: 0 for one that is not there.
struct Source {
  const uint8_t* row[PARTS];
  int columns[PARTS];
  float missing;  // what the parts that are not there add: 0, or NaN
};

template <class Arguments>
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

// Of a tile that was marked, what is missing is in its parts.
template <bool MARKED = false>
DEVICE float gradient_of(const Tile& tile, const Source& source, int c, int j) {
  const float first = unpack<G_TYPE>(tile.parts[0][c], j);
  if constexpr (!GATHERED) return first;
  const float both = __fadd_rn(first, unpack<G_TYPE>(tile.parts[PARTS - 1][c], j));
  return MARKED ? both : __fadd_rn(both, source.missing);
}

// Make a tile's gradient NaN where what is missing is: an addition less for each element elsewhere.
DEVICE void mark(Tile& tile, const Source& source) {
  if (!GATHERED || source.missing == source.missing) return;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < ELEMENTS * G_BITS / 32; ++i) tile.parts[0][c][i] = 0xFFFFFFFFu;
  }
}

// Bit 2 of each nibble that is −8 or 7, whose three lower bits are alike and unlike its highest. Of
// wide codes the high nibbles count.
DEVICE uint32_t clipped(uint32_t codes) {
  const uint32_t differ = codes ^ codes >> 1;
  return differ & ~(differ << 1) & ~(differ << 2) & 0x44444444u;
}

constexpr int CODES = 32 / GIVEN_BITS;           // of a word
constexpr uint32_t EDGE = 4u << GIVEN_BITS - 4;  // of its first, in the highest nibble

// The gradient where it passes, else 0.
template <bool MARKED = false>
DEVICE void mask_by_codes(Values& v, const Tile& tile, const Source& source) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < ELEMENTS / CODES; ++i) {
      uint32_t edges = 0;
      if constexpr (!GIVEN_X) edges = clipped(tile.given[c][i]);
#pragma unroll
      for (int j = 0; j < CODES; ++j) {
        const float g = gradient_of<MARKED>(tile, source, c, CODES * i + j);
        v[c][CODES * i + j] = edges & EDGE << GIVEN_BITS * j ? 0.0f : g;
      }
    }
  }
}
