// What the self-test and the benchmark have in common.
#pragma once

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "manifest.h"

#ifndef SAMPLES_FOLDER
#define SAMPLES_FOLDER "samples"  // another folder where the build says so
#endif

static void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  exit(1);
}

static void check_code(int code) {
  if (code == 0) return;
  fprintf(stderr, "%s: %s\n", NAME, error_text(code));
  exit(1);
}

static size_t recorded_bytes(const Parameter* p) {
  return count_of(p, RECORDED) * element_bytes(p->dtype);
}

static void* allocate(size_t bytes) {
  void* found;
  check(cudaMalloc(&found, bytes), "cudaMalloc");
  check(cudaMemset(found, 0, bytes), "cudaMemset");
  return found;
}

// A tensor of the samples.
static unsigned char* load(const char* folder, const char* prefix, const Parameter* p) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s%s.bin", folder, prefix, p->name);
  const size_t bytes = recorded_bytes(p);
  unsigned char* content = (unsigned char*)malloc(bytes);
  FILE* file = fopen(path, "rb");
  if (file == NULL || fread(content, 1, bytes, file) != bytes) {
    fprintf(stderr, "%s: expected %zu bytes\n", path, bytes);
    exit(1);
  }
  fclose(file);
  return content;
}
