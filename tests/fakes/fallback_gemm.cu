// A launch of the fallback GEMM on the host: its blocks one after another.
#include "wgmma.cu"

alignas(1024) uint8_t shared[SHARED_BYTES];

template <class Work>
void on_threads(int count, const Work& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&work, i] {
      threadIdx.x = i;
      work();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Codes of the operand of a tile's rows, of that of its columns and of the second plane, m×k, n×k and
// as its side; C has the rows and columns of `turned`.
extern "C" void launch(int blocks, int8_t* a, int8_t* b, int8_t* second, const float* a_scale,
                       const float* b_scale, const float* second_scale, const float* bias, void* c,
                       int m, int n, int k) {
  Arguments x{};
  x.a = {a, m, k, TILE_M, TILE_K};
  x.b = {b, n, k, TILE_N, TILE_K};
  x.second = PLANES_OF_B ? x.b : x.a;
  x.second.matrix = second;
  if (TURNED) x.out = {static_cast<int8_t*>(c), n, m, 64, TURNED_ROWS, ELEMENT_BYTES};
  else x.out = {static_cast<int8_t*>(c), m, n, 64, PANEL_COLUMNS, ELEMENT_BYTES};
  x.a_scale = a_scale, x.b_scale = b_scale, x.second_scale = second_scale;
  x.to.c = c, x.to.bias = bias, x.to.m = m, x.to.n = n, x.k = k;
  gridDim.x = blocks, block_threads = 128 * (GROUPS + 1);
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    std::fill(shared, shared + SHARED_BYTES, 0x5A);
    on_threads(block_threads, [&x] { fallback_gemm(x); });
  }
}

// The steps of a tile, as a warp finds them: blocks of K, those of the second plane after `blocks`.
extern "C" int steps(const float* second_scale, int row, int rows, int k, int* found) {
  Arguments x{};
  x.second_scale = second_scale, x.to.m = x.to.n = rows, x.k = k;
  int count = 0;
  on_threads(32, [&] {
    Walk walk(x, {row, row});
    for (Step step; step.exists(); step = walk.after(step)) {
      if (threadIdx.x == 0) found[count++] = step.block + step.second * walk.blocks;
    }
  });
  return count;
}
