// A matrix of bf16 to codes.
constexpr int MATRICES = 1;
#include "bf16_tiles.cuh"
