// What the tables in manifest.h are made of.
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef enum {
  DTYPE_INT8,
  DTYPE_UINT8,
  DTYPE_INT32,
  DTYPE_INT64,
  DTYPE_FLOAT32,
  DTYPE_BFLOAT16,
  DTYPE_FLOAT16,
} Dtype;

enum { READ = 1, WRITTEN = 2, MOST_SIDES = 4 };

// A side of a tensor: factor * size / divisor elements, rounded up.
typedef struct {
  int dim;  // the size's number; -1 for just `factor`
  int factor, divisor;
} Extent;

// A contiguous row-major tensor that the function takes.
typedef struct {
  const char* name;
  Dtype dtype;
  int role;  // READ, WRITTEN or both
  int sides;
  Extent shape[MOST_SIDES];
} Parameter;

static inline size_t element_bytes(Dtype dtype) {
  static const unsigned char BYTES[] = {1, 1, 4, 8, 4, 2, 2};
  return BYTES[dtype];
}

static inline int64_t extent_of(Extent extent, const int* size) {
  const int64_t whole = extent.dim < 0 ? 1 : size[extent.dim];
  return (extent.factor * whole + extent.divisor - 1) / extent.divisor;
}

static inline size_t count_of(const Parameter* parameter, const int* size) {
  size_t count = 1;
  for (int i = 0; i < parameter->sides; i++) count *= (size_t)extent_of(parameter->shape[i], size);
  return count;
}
