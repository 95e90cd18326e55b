// Times the function on a GPU: replays of a CUDA graph of calls that walk over several sets of
// tensors, so that none finds its inputs in the L2 cache.
//
//   benchmark [SIZES]    by default the sizes that it was made for
//
// Inputs hold the recorded ones of samples/, repeated: random values of the right kind.
#include <ctype.h>
#include <limits.h>

#include "program.h"

enum { MOST_SETS = 32, SAMPLES = 31 };
// A sample lasts as long, so that what a graph's launch costs is little of it; and the clock of an
// idle GPU takes a while to rise.
enum { SAMPLE_MS = 5, WARM_MS = 100 };

static cudaStream_t stream;
static cudaEvent_t begin, end;

static size_t bytes_of(int tensor, const int* size) {
  return count_of(&PARAMETERS[tensor], size) * element_bytes(PARAMETERS[tensor].dtype);
}

// The recorded elements, over and over.
static void fill(char* device, size_t bytes, const Parameter* p) {
  unsigned char* host = load(SAMPLES_FOLDER, "", p);
  size_t filled = recorded_bytes(p) < bytes ? recorded_bytes(p) : bytes;
  check(cudaMemcpy(device, host, filled, cudaMemcpyHostToDevice), p->name);
  free(host);
  for (; filled < bytes; filled *= 2) {
    const size_t part = filled < bytes - filled ? filled : bytes - filled;
    check(cudaMemcpy(device + filled, device, part, cudaMemcpyDeviceToDevice), p->name);
  }
}

static int by_value(const void* a, const void* b) {
  const float x = *(const float*)a, y = *(const float*)b;
  return (x > y) - (x < y);
}

// Milliseconds that a graph takes.
static float elapsed(cudaGraphExec_t graph) {
  float ms;
  check(cudaEventRecord(begin, stream), "cudaEventRecord");
  check(cudaGraphLaunch(graph, stream), "cudaGraphLaunch");
  check(cudaEventRecord(end, stream), "cudaEventRecord");
  check(cudaEventSynchronize(end), NAME);
  check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
  return ms;
}

static cudaGraphExec_t capture(void* p[][TENSORS], int sets, int calls, const int* size,
                               void* workspace) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < calls; i++) check_code(call(p[i % sets], size, workspace, stream));
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiateWithFlags(&executable, graph, 0), "cudaGraphInstantiate");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  return executable;
}

// The median time of a call in milliseconds.
static double time_calls(void* p[][TENSORS], int sets, const int* size) {
  void* workspace = HAS_WORKSPACE ? allocate(workspace_bytes(size)) : NULL;
  check_code(call(p[0], size, workspace, stream));  // whatever a first call does besides
  cudaGraphExec_t graph = capture(p, sets, sets, size, workspace);
  const int rounds = 1 + (int)(SAMPLE_MS / elapsed(graph));
  check(cudaGraphExecDestroy(graph), "cudaGraphExecDestroy");
  graph = capture(p, sets, rounds * sets, size, workspace);
  for (float warm = 0; warm < WARM_MS;) warm += elapsed(graph);
  float ms[SAMPLES];
  for (int i = 0; i < SAMPLES; i++) ms[i] = elapsed(graph);
  qsort(ms, SAMPLES, sizeof *ms, by_value);
  check(cudaGraphExecDestroy(graph), "cudaGraphExecDestroy");
  check(cudaFree(workspace), "cudaFree");
  return ms[SAMPLES / 2] / (rounds * sets);
}

static void report(const int* size, double ms, size_t moved) {
  double flops = FLOPS;
  for (int i = 0; i < DIMS; i++) {
    printf("%s%s=%d", i > 0 ? " " : "", SIZES[i], size[i]);
    flops *= size[i];
  }
  printf(": %.2f us, %.0f GB/s", 1e3 * ms, moved / ms / 1e6);
  if (flops > 0) printf(", %.1f TFLOP/s", flops / ms / 1e9);
  for (size_t i = 0; i < sizeof TUNED / sizeof *TUNED; i++)
    if (TUNED[i].us > 0 && memcmp(size, TUNED[i].size, sizeof TUNED[i].size) == 0)
      printf("; %.2f us when it was tuned", TUNED[i].us);
  printf("\n");
}

static void benchmark(const int* size) {
  size_t bytes = 0, moved = 0;
  for (int i = 0; i < TENSORS; i++) {
    const int role = PARAMETERS[i].role;
    bytes += bytes_of(i, size);
    moved += bytes_of(i, size) * (!!(role & READ) + !!(role & WRITTEN));
  }
  int device, l2;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device), "cudaDeviceGetAttribute");
  size_t sets = 3 * (size_t)l2 / bytes + 1;
  if (sets > MOST_SETS) sets = MOST_SETS;

  void* pointers[MOST_SETS][TENSORS];
  for (size_t s = 0; s < sets; s++)
    for (int i = 0; i < TENSORS; i++) {
      pointers[s][i] = allocate(bytes_of(i, size));
      if (PARAMETERS[i].role & READ)
        fill((char*)pointers[s][i], bytes_of(i, size), &PARAMETERS[i]);
    }
  report(size, time_calls(pointers, (int)sets, size), moved);
  for (size_t s = 0; s < sets; s++)
    for (int i = 0; i < TENSORS; i++) check(cudaFree(pointers[s][i]), "cudaFree");
}

// A size, or 0 where the text is none.
static int size_of(const char* text) {
  char* rest;
  const long size = strtol(text, &rest, 10);
  return rest != text && *rest == '\0' && size > 0 && size <= INT_MAX ? (int)size : 0;
}

static int usage(void) {
  fprintf(stderr, "usage: benchmark [");
  for (int i = 0; i < DIMS; i++) {
    if (i > 0) fputc(' ', stderr);
    for (const char* c = SIZES[i]; *c != '\0'; c++) fputc(toupper(*c), stderr);
  }
  fprintf(stderr, "]\n");
  return 2;
}

int main(int argc, char** argv) {
  int size[DIMS] = {0};
  const int given = argc - 1;
  if (given != 0 && given != DIMS) return usage();
  for (int i = 0; i < given; i++) {
    size[i] = size_of(argv[1 + i]);
    if (size[i] == 0) return usage();
  }
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  if (given > 0) benchmark(size);
  for (size_t i = 0; given == 0 && i < sizeof TUNED / sizeof *TUNED; i++) benchmark(TUNED[i].size);
  return 0;
}
