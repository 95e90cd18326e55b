// Three matrices of bf16 that stand side by side to codes.
constexpr int MATRICES = 3;
#include "bf16_tiles.cuh"
