// The PTX instructions that the kernels are written in, one function each (PTX ISA 8.0 and later).
#pragma once

using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned;
using int64_t = long long;
using uint64_t = unsigned long long;

#define DEVICE __device__ __forceinline__

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// --- mbarriers ---------------------------------------------------------------------------------

DEVICE void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive at the barrier that lies at the same offset in another block of the cluster.
DEVICE void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}"
      ::"r"(barrier), "r"(rank) : "memory");
}

DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}"
      ::"r"(barrier), "r"(parity) : "memory");
}

// Barrier of `threads` threads; 0 is __syncthreads' own.
DEVICE void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrive at a named barrier without waiting.
DEVICE void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- clusters ----------------------------------------------------------------------------------

DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// --- tensor memory accelerator -----------------------------------------------------------------

struct alignas(64) TensorMap {
  uint8_t bytes[128];
};

// A box of a matrix into shared memory; `x` counts elements along a row.
DEVICE void tma_load(uint32_t to, const TensorMap& map, int x, int y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];"
      ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier) : "memory");
}

// The same box to the same place in every block of the cluster that `mask` names.
DEVICE void tma_load_multicast(uint32_t to, const TensorMap& map, int x, int y, uint32_t barrier,
                               uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
      ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"(mask) : "memory");
}

DEVICE void tma_store(const TensorMap& map, uint32_t from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
               ::"l"(&map), "r"(x), "r"(y), "r"(from) : "memory");
}

// Adds a box to what memory holds, in L2.
DEVICE void tma_add(const TensorMap& map, uint32_t from, int x, int y) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%1, %2}], [%3];"
               ::"l"(&map), "r"(x), "r"(y), "r"(from) : "memory");
}

DEVICE void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until at most `PENDING` groups of stores have yet to read their shared memory.
template <int PENDING>
DEVICE void tma_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Wait until every store has reached memory.
DEVICE void tma_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// What ordinary stores wrote to shared memory, the copy engine and the tensor cores may read.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- counters in memory --------------------------------------------------------------------------

DEVICE int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

DEVICE void store_release(int* to, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// --- warp groups -------------------------------------------------------------------------------

template <int REGISTERS>
DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Where a matrix of rows of 128 bytes, K-contiguous, in TMA's 128-byte swizzle lies: the low half
// of its descriptor, which counts in units of 16 bytes.
DEVICE uint32_t wgmma_address(uint32_t address) { return (address & 0x3FFFF) >> 4 | 1 << 16; }

// The high half says: groups of eight rows 1024 bytes apart, and which swizzle.
DEVICE uint64_t wgmma_descriptor(uint32_t address) {
  return uint64_t(64 | 1 << 30) << 32 | address;
}

// --- the rest ----------------------------------------------------------------------------------

// Four 8×8 matrices of 16-bit elements; lane i has the address of row i%8 of matrix i/8.
DEVICE void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

DEVICE float load_shared_float(uint32_t from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}

DEVICE uint16_t load_shared_u16(uint32_t from) {
  uint16_t x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(from) : "memory");
  return x;
}

DEVICE void store_shared(uint32_t to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}

DEVICE void store_shared(uint32_t to, uint16_t x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(x) : "memory");
}

DEVICE void store_shared(uint32_t to, uint8_t x) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(uint32_t(x)) : "memory");
}

// Two floats as bf16 or fp16, ties to even, the first in the low half.
DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

DEVICE uint32_t pack_fp16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

DEVICE float bf16_to_float(uint16_t x) { return __uint_as_float(uint32_t(x) << 16); }

DEVICE float fp16_to_float(uint16_t x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
  return wide;
}
