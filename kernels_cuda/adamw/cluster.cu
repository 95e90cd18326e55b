// AdamW with moments in fp32, and the new weight's codes, in one pass.
#include "adamw_cluster.cuh"

// √x within a unit in the last place or two, of subnormal numbers too.
DEVICE float root_of(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Make the step of row k.
DEVICE void update(float (&param)[EACH], const Shared& shared, int k, const Scalars& scalars,
                   const Lane& lane, const Arguments& p) {
  const int place = lane.place<ELEMENT>(k);
  const Weights old = *reinterpret_cast<const Weights*>(shared.weights[0] + place);
  const Weights grad = *reinterpret_cast<const Weights*>(shared.weights[1] + place);
  Moments first = *reinterpret_cast<const Moments*>(shared.moments[0] + place);
  Moments second = *reinterpret_cast<const Moments*>(shared.moments[1] + place);
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const float g = GUARDED ? __fmul_rn(grad.at(j), scalars.inverse) : grad.at(j);
    const float square = __fmul_rn(g, g);
    const float m = __fmaf_rn(first.at(j), p.beta[0], __fmul_rn(g, p.share[0]));
    const float v = __fmaf_rn(second.at(j), p.beta[1], __fmul_rn(square, p.share[1]));
    param[j] = stepped(old.at(j), m, root_of(v), scalars, p);
    first.words[j] = __float_as_uint(m), second.words[j] = __float_as_uint(v);
  }
  if (GUARDED && scalars.failed) return;
  store_weights(param, k, lane, p);
  store(p.moments[0], first, k, lane, p);
  store(p.moments[1], second, k, lane, p);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
    cluster(const __grid_constant__ Arguments p) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Lane lane(p);
  begin(shared);
  load(shared, lane, p);
  const Scalars scalars(p);  // while the slice is on its way
  if (TMA) barrier_wait(shared_address(&shared.arrived), 0);
  float param[ROWS][EACH];
#pragma unroll
  for (int k = 0; k < ROWS; ++k) update(param[k], shared, k, scalars, lane, p);
  write_codes(shared, param, lane, p);
}
