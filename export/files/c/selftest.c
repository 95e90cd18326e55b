// Runs the function twice on recorded inputs and compares with recorded outputs; needs a GPU.
//
//   selftest [FOLDER]    where the recorded tensors are; exit code 0: ok, 1: failed
#include <math.h>

#include "program.h"

enum { UNWRITTEN = 0xFF };  // every byte of an output before a run: no result is so

// A tensor on the device, and on the host what it holds before a run, should and did after two.
typedef struct {
  void* device;
  unsigned char *recorded, *expected, *written[2];
} Content;

static Content contents[TENSORS];

static double bf16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

static double fp16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double value = exponent == 31 ? (fraction ? NAN : INFINITY)
                       : exponent > 0 ? ldexp(1024 + fraction, exponent - 25)
                                      : ldexp(fraction, -24);
  return bits >> 15 ? -value : value;
}

// An element of a tensor that may differ from what is expected.
static double element(Dtype dtype, const void* tensor, size_t i) {
  switch (dtype) {
    case DTYPE_INT8:
      return ((const int8_t*)tensor)[i];
    case DTYPE_FLOAT32:
      return ((const float*)tensor)[i];
    case DTYPE_BFLOAT16:
      return bf16(((const uint16_t*)tensor)[i]);
    case DTYPE_FLOAT16:
      return fp16(((const uint16_t*)tensor)[i]);
    default:
      return NAN;
  }
}

static int call_function(const int* size, void* workspace, cudaStream_t stream) {
  void* tensors[TENSORS];
  for (int i = 0; i < TENSORS; i++) tensors[i] = contents[i].device;
  return call(tensors, size, workspace, stream);
}

// Sets every output to what no result is, or to its recorded value where it is read too; calls the
// function, and takes what it wrote.
static void run(void* workspace, cudaStream_t stream, int which) {
  for (int i = 0; i < TENSORS; i++) {
    const Parameter* p = &PARAMETERS[i];
    const Content* c = &contents[i];
    if (p->role & READ)
      check(cudaMemcpy(c->device, c->recorded, recorded_bytes(p), cudaMemcpyHostToDevice), p->name);
    else
      check(cudaMemset(c->device, UNWRITTEN, recorded_bytes(p)), p->name);
  }
  check_code(call_function(RECORDED, workspace, stream));
  check(cudaStreamSynchronize(stream), NAME);
  for (int i = 0; i < TENSORS; i++) {
    const Parameter* p = &PARAMETERS[i];
    const Content* c = &contents[i];
    if (p->role & WRITTEN)
      check(cudaMemcpy(c->written[which], c->device, recorded_bytes(p), cudaMemcpyDeviceToHost),
            p->name);
  }
}

// Whether an element must be written; others may hold anything.
static int is_wanted(int tensor, size_t i) {
  const Parameter* p = &PARAMETERS[tensor];
  const size_t row = p->sides > 0 ? (size_t)extent_of(p->shape[p->sides - 1], RECORDED) : 1;
  return i / row < EXPECTED[tensor].rows && i % row < EXPECTED[tensor].columns;
}

static size_t differing(int tensor, const unsigned char* a, const unsigned char* b) {
  const size_t bytes = element_bytes(PARAMETERS[tensor].dtype);
  const size_t count = count_of(&PARAMETERS[tensor], RECORDED);
  size_t found = 0;
  for (size_t i = 0; i < count; i++)
    found += is_wanted(tensor, i) && memcmp(a + i * bytes, b + i * bytes, bytes) != 0;
  return found;
}

// ||written - expected|| / ||expected||. Equal elements, NaNs among them, are no difference.
static double relative_error(int tensor) {
  const Parameter* p = &PARAMETERS[tensor];
  const size_t count = count_of(p, RECORDED);
  double difference = 0, norm = 0;
  for (size_t i = 0; i < count; i++) {
    const double got = element(p->dtype, contents[tensor].written[0], i);
    const double want = element(p->dtype, contents[tensor].expected, i);
    if (!is_wanted(tensor, i)) continue;
    if (isfinite(want)) norm += want * want;
    if (got != want && !(isnan(got) && isnan(want))) difference += (got - want) * (got - want);
  }
  return difference == 0 ? 0 : sqrt(difference / norm);
}

static int is_right(int tensor) {
  const char* name = PARAMETERS[tensor].name;
  const Content* c = &contents[tensor];
  const size_t count = count_of(&PARAMETERS[tensor], RECORDED);
  const double tolerance = EXPECTED[tensor].tolerance;
  const size_t other = differing(tensor, c->written[0], c->written[1]);
  if (other > 0) {
    printf("%s: a second run gave other bits in %zu of %zu elements\n", name, other, count);
    return 0;
  }
  if (tolerance == 0) {
    const size_t wrong = differing(tensor, c->written[0], c->expected);
    printf("%s: %zu of %zu elements differ\n", name, wrong, count);
    return wrong == 0;
  }
  const double error = relative_error(tensor);
  printf("%s: relative error %.1e, at most %.1e\n", name, error, tolerance);
  return error <= tolerance;
}

int main(int argc, char** argv) {
  const char* folder = argc > 1 ? argv[1] : SAMPLES_FOLDER;
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  for (int i = 0; i < TENSORS; i++) {
    const Parameter* p = &PARAMETERS[i];
    Content* c = &contents[i];
    c->device = allocate(recorded_bytes(p));
    if (p->role & READ) c->recorded = load(folder, "", p);
    if (!(p->role & WRITTEN)) continue;
    c->expected = load(folder, "expected_", p);
    for (int which = 0; which < 2; which++)
      c->written[which] = (unsigned char*)malloc(recorded_bytes(p));
  }
  void* workspace = HAS_WORKSPACE ? allocate(workspace_bytes(RECORDED)) : NULL;

  run(workspace, stream, 0);
  run(workspace, stream, 1);
  int ok = 1;
  for (int i = 0; i < TENSORS; i++)
    if (PARAMETERS[i].role & WRITTEN) ok &= is_right(i);
  const int none[DIMS] = {0};
  if (call_function(none, workspace, stream) != BAD_SIZE_CODE) {
    printf("sizes of 0 are not refused\n");
    ok = 0;
  }
  puts(ok ? "ok" : "FAILED");
  return ok ? 0 : 1;
}
