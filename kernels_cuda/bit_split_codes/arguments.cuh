// What both functions take.
#pragma once

#include "quantize.cuh"
#include "config.cuh"

struct Arguments {
  const uint8_t* q;
  const float* scale;
  const uint64_t* seed;
  float* unit;
  uint8_t* parts;
  int32_t* squares;
  float* sums;
  int64_t* totals;     // n of the columns, and how many blocks have added theirs
  uint32_t* counters;  // two, that are zero before and after a launch
  int64_t pitch, scale_pitch;
  int32_t m, n;
};
