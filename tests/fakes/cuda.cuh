// A stand-in for CUDA and for ptx.cuh, so that host code runs a kernel's blocks or its ends of tiles:
// a thread of the host for each of a block's, barriers and warps' exchanges between them, one shared
// memory.
// It is copied under several names. Without a guard of its own, by `#pragma once`, g++ would take two
// copies for one file only if they were made in the same second.
#ifndef FAKE_CUDA
#define FAKE_CUDA

#include <algorithm>
#include <array>
#include <cfenv>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#define DEVICE inline
#define __device__
#define __global__
#define __host__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)

using std::max;
using std::min;

struct Index {
  unsigned x;
};
inline thread_local Index threadIdx;
inline Index blockIdx{0}, gridDim{1};

struct float2 {
  float x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float4 __ldcg(const float4* from) { return *from; }
inline void __stcg(float4* to, float4 x) { *to = x; }

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// --- barriers and warps --------------------------------------------------------------------------

// Wait until others have met a condition. Who waits in vain fails the test: it would hang.
template <class Met>
void wait_for_others(std::condition_variable& told, std::unique_lock<std::mutex>& lock, Met met) {
  if (told.wait_for(lock, std::chrono::minutes(2), met)) return;
  std::fputs("a thread waited two minutes at a barrier\n", stderr);
  std::abort();
}

class Meeting {
 public:
  void meet(int threads, bool wait) {
    std::unique_lock lock(mutex);
    const int mine = round;
    if (++arrived == threads) {
      arrived = 0, ++round;
      all.notify_all();
    } else if (wait) {
      wait_for_others(all, lock, [&] { return round != mine; });
    }
  }

 private:
  std::mutex mutex;
  std::condition_variable all;
  int arrived = 0, round = 0;
};

inline std::array<Meeting, 16> named;
inline std::array<Meeting, 32> warps;
inline uint32_t words[32][32];  // of warps and their lanes

inline int block_threads;              // that `__syncthreads` waits for

inline int warp_index() { return threadIdx.x / 32; }
inline void __syncwarp() { warps[warp_index()].meet(32, true); }
inline void named_barrier(int id, int threads) { named[id].meet(threads, true); }
inline void named_arrive(int id, int threads) { named[id].meet(threads, false); }
inline void __syncthreads() { named_barrier(0, block_threads); }

// What all lanes of the warp have at once.
inline std::array<uint32_t, 32> exchange(uint32_t mine) {
  uint32_t(&slots)[32] = words[warp_index()];
  slots[threadIdx.x % 32] = mine;
  __syncwarp();
  std::array<uint32_t, 32> all;
  std::copy(slots, slots + 32, all.begin());
  __syncwarp();
  return all;
}

inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float __int_as_float(int bits) { return __uint_as_float(bits); }
inline int __float_as_int(float x) { return __float_as_uint(x); }

inline uint32_t __reduce_max_sync(uint32_t, uint32_t x) {
  const auto all = exchange(x);
  return *std::max_element(all.begin(), all.end());
}
inline uint32_t __ballot_sync(uint32_t, bool x) {
  const auto all = exchange(x);
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= all[i] << i;
  return bits;
}
inline uint32_t __shfl_sync(uint32_t, uint32_t x, int lane) { return exchange(x)[lane]; }
inline int __shfl_sync(uint32_t, int x, int lane) { return exchange(x)[lane]; }
inline float __shfl_sync(uint32_t, float x, int lane) {
  return __uint_as_float(exchange(__float_as_uint(x))[lane]);
}
inline int __ffs(uint32_t x) { return __builtin_ffs(x); }
inline uint32_t __shfl_xor_sync(uint32_t, uint32_t x, int step) {
  return exchange(x)[threadIdx.x % 32 ^ step];
}

// --- arithmetic ----------------------------------------------------------------------------------

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float __int2float_rn(int x) { return float(x); }
inline float __fadd_rd(float a, float b) {
  volatile float x = a, y = b;
  std::fesetround(FE_DOWNWARD);
  volatile float sum = x + y;
  std::fesetround(FE_TONEAREST);
  return sum;
}
inline float fake_max_nan(float a, float b) {
  if (a != a || b != b) return __uint_as_float(0x7FFFFFFF);
  return a > b ? a : b;
}
inline int fake_code(float x) {
  return x != x ? 0 : int(std::nearbyint(std::clamp(x, -128.0f, 127.0f)));
}
// As far off as rcp.approx is allowed to be: one unit, either way.
inline float fake_reciprocal(float x) {
  const uint32_t bits = __float_as_uint(x);
  return __uint_as_float(__float_as_uint(1.0f / x) + int(bits * 2654435761u >> 30) % 3 - 1);
}
inline uint32_t to_bf16(float x) {
  const uint32_t bits = __float_as_uint(x);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline uint32_t pack_bf16(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= uint32_t(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  }
  return result;
}
inline void __threadfence() {}

// --- shared memory -------------------------------------------------------------------------------

extern uint8_t shared[];

inline uint32_t shared_address(const void* p) { return static_cast<const uint8_t*>(p) - shared; }
template <class T>
inline void store_as(uint32_t to, T x) {
  std::memcpy(shared + to, &x, sizeof(T));
}
inline void store_shared(uint32_t to, float x, float y) { store_as(to, float2{x, y}); }
inline void store_shared(uint32_t to, float x) { store_as(to, x); }
inline void store_shared(uint32_t to, uint16_t x) { store_as(to, x); }
inline void store_shared(uint32_t to, uint8_t x) { store_as(to, x); }
inline void store_shared(uint32_t to, uint32_t x) { store_as(to, x); }
inline void store_shared(uint32_t to, const uint32_t (&x)[4]) {
  store_as(to, uint4{x[0], x[1], x[2], x[3]});
}
template <class T>
inline T load_as(uint32_t from) {
  T x;
  std::memcpy(&x, shared + from, sizeof(T));
  return x;
}
inline float load_shared_float(uint32_t from) { return load_as<float>(from); }
inline uint16_t load_shared_u16(uint32_t from) { return load_as<uint16_t>(from); }
inline uint4 load_shared(uint32_t from) { return load_as<uint4>(from); }
inline uint4 load_shared_anew(uint32_t from) { return load_as<uint4>(from); }
inline void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const auto rows = exchange(to);
  const int lane = threadIdx.x % 32;
  const uint32_t pairs[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) store_as(rows[8 * i + lane / 4] + lane % 4 * 4, pairs[i]);
}
inline void store_transposed(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const auto rows = exchange(to);
  const int lane = threadIdx.x % 32;
  const uint32_t pairs[] = {a, b, c, d};
  for (int i = 0; i < 8; ++i) {
    const int column = lane % 4 * 2 + i % 2;
    store_as(rows[i / 2 * 8 + column] + lane / 4 * 2, uint16_t(pairs[i / 2] >> i % 2 * 16));
  }
}
inline void load_matrices(uint32_t (&to)[4], uint32_t from) {
  const auto rows = exchange(from);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) to[i] = load_as<uint32_t>(rows[8 * i + lane / 4] + lane % 4 * 4);
  __syncwarp();
}

// --- mbarriers -----------------------------------------------------------------------------------

struct Arrivals {
  int expected, missing;
  int64_t bytes;
  uint32_t phase;
};
inline std::map<uint32_t, Arrivals> mbarriers;  // by their addresses
inline std::mutex arriving;
inline std::condition_variable complete;

inline void arrive(uint32_t barrier, int arrivals, int64_t bytes) {
  const std::lock_guard lock(arriving);
  Arrivals& x = mbarriers.at(barrier);
  x.missing -= arrivals, x.bytes += bytes;
  if (x.missing || x.bytes) return;
  x.missing = x.expected, ++x.phase;
  complete.notify_all();
}
inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
  mbarriers[barrier] = {int(arrivals), int(arrivals), 0, 0};
}
inline void barrier_arrive(uint32_t barrier) { arrive(barrier, 1, 0); }
inline void barrier_expect(uint32_t barrier, uint32_t bytes) { arrive(barrier, 1, bytes); }
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  std::unique_lock lock(arriving);
  wait_for_others(complete, lock, [&] { return mbarriers.at(barrier).phase % 2 != parity; });
}

// --- the copy engine -----------------------------------------------------------------------------

struct alignas(128) TensorMap {
  int8_t* matrix;
  int rows, columns, box_rows, box_columns, element = 1;
  int64_t pitch = columns * element;  // in bytes

  int bytes() const { return box_rows * box_columns * element; }
  // What a byte of a box has in memory; null beyond the edges.
  int8_t* at(int byte, int x, int y) const {
    const int width = box_columns * element;
    const int row = y + byte / width, column = x * element + byte % width;
    return row < rows && column < columns * element ? matrix + row * pitch + column : nullptr;
  }
  // And where it is in shared memory, in the swizzle of its width.
  uint32_t swizzled(int byte) const {
    return byte ^ (byte >> 7 & (box_columns * element / 16 - 1)) << 4;
  }
};

inline void tma_store(const TensorMap& map, uint32_t from, int x, int y) {
  for (int i = 0; i < map.bytes(); ++i) {
    if (int8_t* to = map.at(i, x, y)) *to = shared[from + map.swizzled(i)];
  }
}
inline void tma_add(const TensorMap&, uint32_t, int, int) {}
inline void tma_load(uint32_t to, const TensorMap& map, int x, int y, uint32_t barrier) {
  for (int i = 0; i < map.bytes(); ++i) {
    const int8_t* from = map.at(i, x, y);
    shared[to + map.swizzled(i)] = from ? *from : 0;
  }
  arrive(barrier, 0, -map.bytes());
}
inline void tma_load_multicast(uint32_t, const TensorMap&, int, int, uint32_t, uint16_t) {}
inline void tma_commit() {}
inline void tma_wait_all() {}
inline void fence_async() {}
template <int PENDING>
inline void tma_wait_read() {}

// --- tensor cores --------------------------------------------------------------------------------

inline uint32_t wgmma_address(uint32_t address) { return address / 16; }
inline uint64_t wgmma_descriptor(uint32_t address) { return address; }

// A byte of a matrix of rows of 128, in their swizzle.
inline int operand(uint64_t descriptor, int row, int k) {
  const uint32_t at = descriptor * 16 + row * 128 + k;
  return int8_t(shared[at ^ (at >> 7 & 7) << 4]);
}
template <int COUNT>
inline void wgmma(int (&sums)[COUNT], uint64_t a, uint64_t b, int accumulate) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < COUNT; ++i) {
    const int row = threadIdx.x / 32 % 4 * 16 + lane / 4 + i / 2 % 2 * 8;
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (!accumulate) sums[i] = 0;
    for (int k = 0; k < 32; ++k) sums[i] += operand(a, row, k) * operand(b, column, k);
  }
}

// --- what does nothing here ----------------------------------------------------------------------

inline void barrier_arrive_at(uint32_t, uint32_t) {}
inline void fence_barrier_init() {}
inline void prefetch(const void*) {}
inline uint32_t cluster_rank() { return 0; }
inline void cluster_sync() {}
inline int load_acquire(const int* from) { return *from; }
inline void store_release(int* to, int value) { *to = value; }
template <int>
inline void take_registers() {}
template <int>
inline void give_registers() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int>
inline void wgmma_wait() {}
inline uint32_t pack_fp16(float, float) { return 0; }
inline float bf16_to_float(uint16_t) { return 0; }
inline float fp16_to_float(uint16_t) { return 0; }

#endif
