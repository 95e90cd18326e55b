// LayerNorm's gradient from one reading of x and dy.
constexpr bool CENTERED = true;
#include "cluster_norm.cuh"
