// What LayerNorm's gradient has to add up.
constexpr bool CENTERED = true;
#include "norm_sums.cuh"
