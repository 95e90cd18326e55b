// RMSNorm's gradient from what was added up.
constexpr bool CENTERED = false;
#include "norm_gradient.cuh"
