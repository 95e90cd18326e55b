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

extern "C" void launch(int blocks, const void* arguments) {
  Arguments x;
  std::memcpy(&x, arguments, sizeof x);
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
