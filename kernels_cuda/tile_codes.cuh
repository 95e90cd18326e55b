// Codes of a tile's parts: their block's largest value, rounding, and storing as they are and
// transposed.
//
// A block of the output may have several warps' parts. What a kernel quantises is held in registers
// until the largest is known, HELD parts at a time. Its arguments have q, scale, qt and scale_t, m
// and n, or the struct of an output that has a pitch of its own does.
#pragma once

#include "tiles.cuh"

constexpr int HELD = OUT_BLOCK == SIDE ? 1 : PARTS;  // parts that a warp has in registers at once

// The largest of the parts of the block that the warp's are of, as the bits of floats: those above
// 0 order as they do, and NaN above all. All warps of the block come here.
DEVICE uint32_t largest(uint32_t (&slots)[PARTS_OF_TILE], const uint32_t (&most)[HELD], int part,
                        const Lane& lane) {
  if constexpr (OUT_BLOCK == SIDE) return most[0];
  constexpr int N = OUT_BLOCK / SIDE, BLOCKS = PARTS_OF_TILE / (N * N);
  const int down = part / ACROSS / N, across = part % ACROSS / N;
#pragma unroll
  for (int b = 0; b < HELD; ++b) {
    if (lane.index == 0) slots[part + b] = most[b];
  }
  named_barrier(1 + down * (ACROSS / N) + across, THREADS / BLOCKS);
  const int first = (down * ACROSS + across) * N, i = lane.index % (N * N);
  return __reduce_max_sync(ALL, slots[first + i / N * ACROSS + i % N]);
}

// Codes of a part's values, at(k, j). All products must be within ±127, stochastically below it, and
// are not rounded by themselves. If EXACT they are, and only that of -amax may floor to -128.
template <bool EXACT, class Part>
DEVICE void quantise(uint2 (&to)[TALL], const Part& from, float multiplier, uint64_t seed,
                     int row0, int column0, const Lane& lane, uint32_t stream = 0) {
  Words words[TALL];
  if constexpr (STOCHASTIC) {
    const int rows[TALL] = {row0 + lane.row_at(0), row0 + lane.row_at(1), row0 + lane.row_at(2),
                            row0 + lane.row_at(3)};
    draw(words, seed, rows, column0 + lane.column, stream);
  }
#pragma unroll
  for (int k = 0; k < TALL; ++k) {
    uint32_t codes[WIDE];
#pragma unroll
    for (int j = 0; j < WIDE; ++j) {
      const float x = from.at(k, j);
      if constexpr (EXACT) {
        const float product = __fmul_rn(x, multiplier);
        if constexpr (STOCHASTIC) codes[j] = code_stochastic(product, words[k].w[j / 2], j % 2);
        else codes[j] = code_nearest(product);
      } else {
        if constexpr (STOCHASTIC) codes[j] = rounded(x, multiplier, words[k], j);
        else codes[j] = rounded(x, multiplier);
      }
    }
    to[k] = {pack(codes[0], codes[1], codes[2], codes[3]),
             pack(codes[4], codes[5], codes[6], codes[7])};
  }
}

// Elements from row to row of the codes and scales that are written. An output whose rows may lie
// apart has overloads of both.
template <class Arguments>
DEVICE int pitch_of(const Arguments& p) {
  return p.n;
}
template <class Arguments>
DEVICE int scale_pitch_of(const Arguments& p) {
  return ceil_div(p.n, OUT_BLOCK);
}

template <class Arguments>
DEVICE void store(const uint2 (&codes)[TALL], int row0, int column0, const Arguments& p,
                  const Lane& lane) {
  const int row = row0 + (lane.row & ~2), column = column0 + lane.column;
  // Of words all codes are within the matrix, or none.
  const int rows = QT_ACCESS == TALL ? (row < p.m ? TALL : 0) : p.m - row;
  const int columns = Q_ACCESS == WIDE ? (column < p.n ? WIDE : 0) : p.n - column;
  if constexpr (WRITES_Q) {
    uint8_t* q = p.q + int64_t(row0 + lane.row) * pitch_of(p) + column;
    const int64_t two = int64_t(pitch_of(p)) * (lane.exchanged ? -2 : 2);
#pragma unroll
    for (int k = 0; k < TALL; ++k) {
      uint8_t* to = q + (k < 2 ? 0 : two) + k % 2 * pitch_of(p);
      const bool inside = QT_ACCESS == TALL ? rows > 0 : row0 + lane.row_at(k) < p.m;
      if (inside) store_row<Q_ACCESS>(to, codes[k], columns);
    }
  }
  if constexpr (WRITES_QT) {
    uint32_t words[WIDE / 4][4];
    transpose(words[0], codes[0].x, codes[1].x, codes[2].x, codes[3].x, lane.exchanged);
    transpose(words[1], codes[0].y, codes[1].y, codes[2].y, codes[3].y, lane.exchanged);
    uint8_t* qt = p.qt + int64_t(column) * p.m + row;
#pragma unroll
    for (int j = 0; j < WIDE; ++j, qt += p.m) {
      if (j < columns) store_column<QT_ACCESS>(qt, words[j / 4][j % 4], rows);
    }
  }
}

// The scale of a block of the output, by the warp whose first part, at (row, column), is the
// block's.
template <class Arguments>
DEVICE void store_scale(float scale, int part, int row, int column, const Arguments& p,
                        const Lane& lane) {
  const bool first = row_of(part) % OUT_BLOCK == 0 && column_of(part) % OUT_BLOCK == 0;
  if (!first || lane.index != 0 || row >= p.m || column >= p.n) return;
  const int64_t i = row / OUT_BLOCK, j = column / OUT_BLOCK;
  if (WRITES_Q) p.scale[i * scale_pitch_of(p) + j] = scale;
  if (WRITES_QT) p.scale_t[j * ceil_div(p.m, OUT_BLOCK) + i] = scale;
}

// Make codes 0 where the multiplier is, as some values may not be finite then.
DEVICE void if_sound(uint2 (&codes)[TALL], float multiplier) {
  const uint32_t sound = multiplier != 0 ? ALL : 0;
#pragma unroll
  for (int k = 0; k < TALL; ++k) codes[k] = {codes[k].x & sound, codes[k].y & sound};
}

// Of four codes, those of -128 as -127.
DEVICE uint32_t above_least(uint32_t codes) {
  const uint32_t rest = codes ^ 0x80808080u;  // a byte of 0 for each
  const uint32_t found = ~((rest & 0x7F7F7F7Fu) + 0x7F7F7F7Fu | rest) & 0x80808080u;
  return codes + (found >> 7);
}

// Quantise and store a warp's parts, of values at(k, j), with the bits of each one's largest. All
// warps of a block come here.
template <bool EXACT, class Part, class Arguments>
DEVICE void store_parts(const Part (&held)[HELD], const uint32_t (&most)[HELD],
                        uint32_t (&slots)[PARTS_OF_TILE], int part, int row, int column,
                        uint64_t seed, const Arguments& p, const Lane& lane) {
  float scale, multiplier;
  const uint32_t amax = largest(slots, most, part, lane);
  block_scale(amax, scale, multiplier);
  store_scale(scale, part, row, column, p, lane);
  const bool over = EXACT && STOCHASTIC && exceeds(amax, multiplier);
  // A product of just -127 might floor to -128.
  if (!EXACT && STOCHASTIC) multiplier *= 0.9999998f;
#pragma unroll
  for (int b = 0; b < HELD; ++b) {
    uint2 codes[TALL];
    quantise<EXACT>(codes, held[b], multiplier, seed, row, column + b * SIDE, lane);
    if_sound(codes, multiplier);
    if (over) {
#pragma unroll
      for (int k = 0; k < TALL; ++k) {
        codes[k] = {above_least(codes[k].x), above_least(codes[k].y)};
      }
    }
    store(codes, row, column + b * SIDE, p, lane);
  }
}
