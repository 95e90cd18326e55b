// Launches of a kernel on the host: its blocks one after another, each of GROUPS + 1 warp groups. The
// last comes first: with STREAM blocks wait for those that follow.
#pragma once

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

template <class Kernel>
void launch(const Kernel& kernel, int blocks, const void* arguments) {
  Arguments x;
  std::memcpy(&x, arguments, sizeof x);
  gridDim.x = blocks, block_threads = 128 * (GROUPS + 1);
  for (blockIdx.x = blocks; blockIdx.x-- > 0;) {
    std::fill(shared, shared + SHARED_BYTES, 0x5A);
    on_threads(block_threads, [&] { kernel(x); });
  }
}
