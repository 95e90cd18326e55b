// Transform, multiply, round: the 4-bit codes of a matrix's rows, as jetfire.reference's quantize
// has them to the bit.
#include "hadamard_rows.cuh"

struct Arguments {
  const uint8_t* x;
  const float* step;
  uint8_t* q;
  uint8_t* wide;
  float* scale;
  int32_t* squares;
  uint32_t* counters;  // two, that are zero before and after a launch
  int64_t pitch;       // bytes from row to row of x
  int32_t m, n;
};

// Whether a sum of any group was not finite, in the threads that have them: 0·sum is then NaN.
DEVICE void note_faults(const Values& v, float& fault) {
  constexpr int STRIDE = GROUP < ELEMENTS ? GROUP : ELEMENTS;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    if (c * RUN % GROUP && GROUP > RUN) continue;
#pragma unroll
    for (int j = 0; j < ELEMENTS; j += STRIDE) fault = __fmaf_rn(v[c][j], 0.0f, fault);
  }
}

// The block that is the last to end writes the scale: NaN if any saw a fault.
DEVICE void write_scale(const Arguments& p, float step, bool bad) {
  const bool faulty = __syncthreads_or(bad);
  if (threadIdx.x) return;
  if (faulty) atomicExch(&p.counters[0], 1u);
  __threadfence();
  const uint32_t last = gridDim.x - 1;
  if (atomicInc(&p.counters[1], last) != last) return;
  __threadfence();
  const bool any = atomicExch(&p.counters[0], 0u);
  *p.scale = any ? __int_as_float(0x7FC00000) : step;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) forward(const Arguments p) {
  const int lane = threadIdx.x % LANES;
  const int64_t row = int64_t(blockIdx.x) * ROWS + threadIdx.x / LANES;
  const int columns = row < p.m ? p.n : 0;
  const uint8_t* x = p.x + row * p.pitch;
  uint8_t* q = p.q + row * (p.n / 2);
  uint8_t* wide = p.wide + row * p.n;
  const float step = *p.step, inverse = multiplier(step);
  float fault = 0;
  int squares = 0;

  Raw<bits_of(X_TYPE)> raw;
  int column = lane * ELEMENTS;
  if (PREFETCH) load<bits_of(X_TYPE), X_BYTES>(raw, x, column, columns);
#pragma unroll 1
  for (int start = 0; start < p.n; start += TILE, column += TILE) {
    if (!PREFETCH) load<bits_of(X_TYPE), X_BYTES>(raw, x, column, columns);
    Values v;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
      for (int j = 0; j < ELEMENTS; ++j) v[c][j] = unpack<X_TYPE>(raw[c], j);
    }
    if (PREFETCH) load<bits_of(X_TYPE), X_BYTES>(raw, x, column + TILE, columns);
    butterflies(v, lane);
    note_faults(v, fault);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      uint32_t bytes[ELEMENTS / 4], nibbles[ELEMENTS / 8];
#pragma unroll
      for (int i = 0; i < ELEMENTS / 4; ++i) {
        bytes[i] = bytes_of(&v[c][4 * i], inverse);
        squares = __dp4a(int(bytes[i]), int(bytes[i]), squares);
      }
#pragma unroll
      for (int i = 0; i < ELEMENTS / 8; ++i) {
        nibbles[i] = nibbles_of(bytes[2 * i], bytes[2 * i + 1]);
      }
      if (PACKED) store<4, PACKED_BYTES>(q, nibbles, column + c * RUN, columns);
#pragma unroll
      for (int i = 0; i < ELEMENTS / 4; ++i) bytes[i] = bytes[i] << 4 & 0xF0F0F0F0u;
      if (WIDE) store<8, WIDE_BYTES>(wide, bytes, column + c * RUN, columns);
    }
  }

  squares = sum_of_row(squares);
  if (lane == 0 && row < p.m) p.squares[row] = squares;
  // Of a group wider than a run only its first thread has the sum.
  const bool leader = lane * ELEMENTS % GROUP == 0;
  write_scale(p, step, inverse == 0 || (leader && fault != fault));
}
