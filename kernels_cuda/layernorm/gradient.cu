// LayerNorm's gradient from what was added up.
constexpr bool CENTERED = true;
#include "norm_gradient.cuh"
