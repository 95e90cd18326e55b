// What tests call of wgmma.cu on the host: its ends of tiles, and what makes codes there.
#include "wgmma.cu"

#include "launch.cuh"

// The ends of a matrix's tiles, one after another, of sums that lie in memory.
extern "C" void finish(const float* sums, const float* bias, int m, int n, const uint64_t* seed,
                       int8_t* q, float* scale, int8_t* qt, float* scale_t) {
  Arguments x{};
  x.out = {q, m, n, 64, Panel::BYTES};
  x.qt = {qt, n, m, TILE_N, 64};
  x.to = {nullptr, bias, q, scale, qt, scale_t, seed, m, n};
  on_threads(128 * GROUPS, [&] {
    const int group = threadIdx.x / 128;
    Staging staging(group);
    int turn = 0;
    for (int row = 0; row < m; row += TILE_M) {
      for (int column = 0; column < n; column += TILE_N, turn ^= 1) {
        float acc[ROWS][SUMS];
        for (int r = 0; r < ROWS; ++r) {
          for (int i = 0; i < SUMS; ++i) {
            const int at = row + 64 * (group * ROWS + r) + row_of(i), to = column + column_of(i);
            acc[r][i] = at < m && to < n ? sums[int64_t(at) * n + to] : NAN;
          }
          add_bias(acc[r], x.to, column);
        }
        finish_codes(acc, x, staging, group, turn, {row, column});
      }
    }
  });
}

// How many of the floats with an exponent have another scale or multiplier than division gives.
extern "C" int wrong_scales(uint32_t exponent) {
  int wrong = 0;
  for (uint32_t mantissa = 0; mantissa < 1u << 23; ++mantissa) {
    const uint32_t bits = exponent << 23 | mantissa;
    const float amax = __uint_as_float(bits);
    float scale, multiplier;
    block_scale(bits, scale, multiplier);
    wrong += scale != amax / 127.0f || multiplier != 127.0f / amax;
  }
  return wrong;
}

// How many codes of a block's largest elements are not floor(x·multiplier + u), from -127 on; and
// in `held`, for how many these would have been -128.
extern "C" int wrong_codes(uint64_t seed, int* held) {
  std::mt19937_64 random(seed);
  int wrong = *held = 0;
  for (int i = 0; i < 20000; ++i) {
    const uint32_t amax = (27 + random() % 228) << 23 | (random() & 0x7FFFFF), word = random();
    float scale, multiplier;
    block_scale(amax, scale, multiplier);
    for (uint32_t below = 0; below < 4; ++below) {
      for (const float sign : {-1.0f, 1.0f}) {
        for (const uint32_t drawn : {0u, word, ~0u}) {
          for (const bool high : {false, true}) {
            const float x = sign * __uint_as_float(amax - below), product = x * multiplier;
            const float u = (high ? drawn >> 16 : drawn & 0xFFFF) / 65536.0f;
            const float code = std::floor(product + u);
            *held += code < -127.0f;
            const float from = exceeds(amax, multiplier) ? std::fmax(product, -127.0f) : product;
            wrong += int8_t(code_stochastic(from, drawn, high)) != std::fmax(code, -127.0f);
          }
        }
      }
    }
  }
  return wrong;
}
