// What a call launches, as tables that are compiled in, and the function that reads them. Before
// this a file has DIMS, TENSORS, MOST_ARGUMENTS, MOST_MATRICES and driver.h, after it PROBLEMS.
#pragma once

#include "driver.h"

// A row-major matrix as TMA reads it: in boxes, whose rows have as many bytes as the swizzle says.
typedef struct {
  CUtensorMapDataType type;
  int64_t rows, columns, row_bytes;
  unsigned box_rows, box_columns;
  CUtensorMapSwizzle swizzle;
} Matrix;

typedef struct {
  enum { NUMBER, TENSOR, WORKSPACE } kind;
  int tensor;            // its number among the function's
  int64_t value;         // of a number, whose first bytes a kernel takes; of others an offset
  const Matrix* matrix;  // what is passed is a map of the tensor; else NULL
} Argument;

typedef struct {
  int kernel;
  unsigned blocks[3];
  int count;
  const Argument* arguments;
} Launch;

typedef struct {
  int sizes[DIMS];
  size_t workspace_bytes;
  int count;
  const Launch* launches;
} Problem;

// Returns an error code.
static int map_matrix(CUtensorMap* map, const Matrix* matrix, void* address) {
  const cuuint64_t sizes[] = {(cuuint64_t)matrix->columns, (cuuint64_t)matrix->rows};
  const cuuint64_t strides[] = {(cuuint64_t)matrix->row_bytes};
  const cuuint32_t box[] = {matrix->box_columns, matrix->box_rows};
  const cuuint32_t steps[] = {1, 1};
  return code_of(driver.cuTensorMapEncodeTiled(
      map, matrix->type, 2, address, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      matrix->swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
}

static int launch_one(const Launch* one, const void* const* tensors, void* workspace,
                      CUstream stream) {
  uint64_t values[MOST_ARGUMENTS];
  CUtensorMap maps[MOST_MATRICES];
  void* arguments[MOST_ARGUMENTS + 2];
  int mapped = 0;
  for (int i = 0; i < one->count; i++) {
    const Argument* const argument = &one->arguments[i];
    const uint64_t base = argument->kind == TENSOR      ? (uintptr_t)tensors[argument->tensor]
                          : argument->kind == WORKSPACE ? (uintptr_t)workspace
                                                        : 0;
    values[i] = base + (uint64_t)argument->value;
    arguments[i] = &values[i];
    if (argument->matrix == NULL) continue;
    arguments[i] = &maps[mapped];
    const int code = map_matrix(&maps[mapped++], argument->matrix, (void*)(uintptr_t)base);
    if (code != OK) return code;
  }
  // Triton's kernels end with two pointers, to memory that these do not ask for.
  uint64_t none = 0;
  arguments[one->count] = arguments[one->count + 1] = &none;
  return launch(one->kernel, one->blocks[0], one->blocks[1], one->blocks[2], stream, arguments);
}

static const Problem* find_problem(const Problem* problems, size_t count, const int* sizes) {
  for (size_t i = 0; i < count; i++)
    if (memcmp(problems[i].sizes, sizes, sizeof problems[i].sizes) == 0) return &problems[i];
  return NULL;
}

// Returns an error code.
static int run(const Problem* problem, const void* const* tensors, void* workspace,
               CUstream stream) {
  if (problem == NULL) return BAD_SIZE;
  uintptr_t bits = (uintptr_t)workspace;
  for (int i = 0; i < TENSORS; i++) bits |= (uintptr_t)tensors[i];
  if (bits % 16 != 0) return BAD_ALIGNMENT;
  int code = prepare();
  for (int i = 0; i < problem->count && code == OK; i++)
    code = launch_one(&problem->launches[i], tensors, workspace, stream);
  return code;
}
