// RMSNorm's gradient from one reading of x and dy.
constexpr bool CENTERED = false;
#include "cluster_norm.cuh"
