// A launch of the fallback GEMM on the host, and the steps of its tiles.
#include "wgmma.cu"

#include "launch.cuh"

extern "C" void launch(int blocks, const void* arguments) {
  launch(fallback_gemm, blocks, arguments);
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
