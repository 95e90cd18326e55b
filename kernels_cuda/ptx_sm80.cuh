// The PTX instructions of sm_80 and later: asynchronous copies, prefetching, ldmatrix, mma.sync.
#pragma once

#include "ptx.cuh"

// Copies `bytes` of `BYTES` to shared memory and fills the rest with zeros.
template <int BYTES>
DEVICE void copy_async(uint32_t to, const void* from, int bytes) {
  if constexpr (BYTES == 16) {  // past L1: no other copy of the block wants the same bytes
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 ::"r"(to), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 ::"r"(to), "l"(from), "n"(BYTES), "r"(bytes) : "memory");
  }
}

DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most `PENDING` of the groups committed have yet to arrive.
template <int PENDING>
DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Have L1 fetch the line of an address, for whoever reads it later.
DEVICE void prefetch(const void* from) { asm volatile("prefetch.global.L1 [%0];" ::"l"(from)); }

// Four 8×8 matrices of 16-bit elements; lane i has the address of row i%8 of matrix i/8.
DEVICE void load_matrices(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from));
}

// d = A (16×32) · Bᵀ (8×32) + c
DEVICE void mma(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
}

DEVICE void store_shared(uint32_t to, const uint32_t (&x)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

DEVICE void store_shared(uint32_t to, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

DEVICE uint4 load_shared(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
  return x;
}

// The same, which ptxas does not merge with another load from there: a move for each register would
// take the place of the second.
DEVICE uint4 load_shared_anew(uint32_t from) {
  uint4 x;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
  return x;
}

// blockIdx.x, read anew at each call.
DEVICE int block_index() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}
