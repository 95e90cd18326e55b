// What RMSNorm's gradient has to add up.
constexpr bool CENTERED = false;
#include "norm_sums.cuh"
