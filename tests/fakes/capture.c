// A CUDA driver that runs kernels on the host, or captures them: as much of it as replays need.
//
// A stream is any address; a function is one of `functions`. What a function does is written in
// its parameters' words, as a GPU's kernel would do it.
#include <cuda.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef cuStreamBeginCapture
#undef cuGraphKernelNodeGetParams
#undef cuGraphGetEdges

enum { MOST = 64 };

struct function {
  int count;
  size_t starts[8], sizes[8];
  void (*body)(void** parameters);
};

// y = factor·x.
static void scale(void** p) {
  const float *x = *(const float**)p[0], factor = *(float*)p[2];
  float* y = *(float**)p[1];
  for (int i = 0; i < *(int*)p[3]; ++i) y[i] = factor * x[i];
}

// The same of a struct, with the addresses in it: x's as TMA's maps have it.
struct job {
  uint64_t map[16];
  float* end;  // of y
  int64_t count;
  float factor;
};

static void scale_by_job(void** p) {
  const struct job* job = p[0];
  const float* x = (const float*)job->map[0];
  for (int64_t i = 0; i < job->count; ++i) job->end[i - job->count] = job->factor * x[i];
}

// Adds one to the count of launches.
static void count(void** p) { ++**(int**)p[0]; }

static struct function functions[] = {
    {4, {0, 8, 16, 20}, {8, 8, 4, 4}, scale},
    {1, {0}, {sizeof(struct job)}, scale_by_job},
    {1, {0}, {8}, count},
};

void* fake_function(int number) { return &functions[number]; }

struct CUgraphNode_st {
  CUlaunchConfig config;
  CUlaunchAttribute attributes[4];
  struct function* function;
  void* parameters[8];
  char bytes[512];
  CUgraphNodeType type;
};

static struct CUgraphNode_st nodes[MOST];
static int node_count, launched, clusters, besides, failing;
static CUstream capturing, current = (CUstream)64;

void fake_current_stream(CUstream stream) { current = stream; }
void fake_fail(int error) { failing = error; }
void fake_capture(CUstream stream) { capturing = stream; }
int fake_launched(void) { return launched; }
int fake_clusters(void) { return clusters; }
int fake_besides(void) { return besides; }

static int is_beside(const CUlaunchConfig* config) {
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute* attribute = &config->attrs[i];
    if (attribute->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
      return attribute->value.programmaticStreamSerializationAllowed;
    }
  }
  return 0;
}

int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  (void)device;
  *stream = current;
  return 0;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void** p, void** extra) {
  struct function* function = (struct function*)f;
  (void)extra;
  if (failing) return failing;
  if (config->hStream != capturing) {
    ++launched;
    besides += is_beside(config);
    for (unsigned i = 0; i < config->numAttrs; ++i) {
      const CUlaunchAttribute* attribute = &config->attrs[i];
      if (attribute->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
        clusters = attribute->value.clusterDim.x;
      }
    }
    function->body(p);
    return CUDA_SUCCESS;
  }
  struct CUgraphNode_st* node = &nodes[node_count++];
  node->config = *config;
  node->config.attrs = node->attributes;
  node->function = function;
  node->type = CU_GRAPH_NODE_TYPE_KERNEL;
  memcpy(node->attributes, config->attrs, config->numAttrs * sizeof *config->attrs);
  for (int i = 0; i < function->count; ++i) {
    node->parameters[i] = node->bytes + function->starts[i];
    memcpy(node->parameters[i], p[i], function->sizes[i]);
  }
  return CUDA_SUCCESS;
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  if (stream == capturing) nodes[node_count++].type = CU_GRAPH_NODE_TYPE_MEMSET;
  else memset((void*)to, value, bytes);
  return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  if (stream == NULL || mode != CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  capturing = stream, node_count = 0;
  return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  if (stream != capturing) return CUDA_ERROR_ILLEGAL_STATE;
  capturing = NULL;
  *graph = (CUgraph)nodes;
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  const int yes = stream == capturing;
  *status = yes ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

// In the opposite order: the driver promises none.
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* to, size_t* count) {
  (void)graph;
  *count = node_count;
  for (int i = 0; to != NULL && i < node_count; ++i) to[i] = &nodes[node_count - 1 - i];
  return CUDA_SUCCESS;
}

CUresult cuGraphGetEdges_v2(CUgraph graph, CUgraphNode* from, CUgraphNode* to,
                            CUgraphEdgeData* data, size_t* count) {
  (void)graph;
  if (from != NULL && *count == 0) return CUDA_ERROR_INVALID_VALUE;
  *count = node_count > 0 ? node_count - 1 : 0;
  for (int i = 0; from != NULL && i + 1 < node_count; ++i) {
    const int beside = nodes[i + 1].type == CU_GRAPH_NODE_TYPE_KERNEL &&
                       is_beside(&nodes[i + 1].config);
    from[i] = &nodes[i];
    to[i] = &nodes[i + 1];
    if (data == NULL && beside) return CUDA_ERROR_LOSSY_QUERY;
    if (data != NULL) {
      data[i].type = beside ? CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
                            : CU_GRAPH_DEPENDENCY_TYPE_DEFAULT;
    }
  }
  return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
  *type = node->type;
  return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS* to) {
  const CUlaunchConfig* c = &node->config;
  *to = (CUDA_KERNEL_NODE_PARAMS){.func = (CUfunction)node->function,
                                  .gridDimX = c->gridDimX,
                                  .gridDimY = c->gridDimY,
                                  .gridDimZ = c->gridDimZ,
                                  .blockDimX = c->blockDimX,
                                  .blockDimY = c->blockDimY,
                                  .blockDimZ = c->blockDimZ,
                                  .sharedMemBytes = c->sharedMemBytes,
                                  .kernelParams = node->parameters};
  return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeGetAttribute(CUgraphNode node, CUkernelNodeAttrID id,
                                       CUkernelNodeAttrValue* to) {
  memset(to, 0, sizeof *to);
  for (unsigned i = 0; i < node->config.numAttrs; ++i) {
    if (node->attributes[i].id == id) *to = node->attributes[i].value;
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunction f, size_t index, size_t* start, size_t* size) {
  const struct function* function = (const struct function*)f;
  if (index >= (size_t)function->count) return CUDA_ERROR_INVALID_VALUE;
  *start = function->starts[index], *size = function->sizes[index];
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) {
  (void)graph;
  return CUDA_SUCCESS;
}
