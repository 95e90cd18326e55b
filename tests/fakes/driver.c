// A CUDA driver that does nothing and says on standard output what it was asked to.
//
// Its device has the ordinal $FAKE_DEVICE, the capability $FAKE_CAPABILITY, such as 90, and 132
// multiprocessors; the function that $FAKE_FAILURE names fails.
#define _POSIX_C_SOURCE 200809L  // flockfile
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 64 };

static struct {
  size_t bytes;
  int count, sizes[MOST];
} kernels[MOST];
static int loaded;

// Bytes of the next kernel's code, and of each of its parameters.
void fake_kernel(int number, size_t bytes, int count, const int* sizes) {
  kernels[number].bytes = bytes;
  kernels[number].count = count;
  memcpy(kernels[number].sizes, sizes, count * sizeof *sizes);
}

static CUresult result(const char* function) {
  const char* failing = getenv("FAKE_FAILURE");
  return failing != NULL && strcmp(failing, function) == 0 ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error == CUDA_ERROR_UNKNOWN ? "CUDA_ERROR_UNKNOWN" : NULL;
  return *name == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static int setting(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text == NULL ? otherwise : atoi(text);
}

static void print_bytes(const void* start, size_t count) {
  for (size_t i = 0; i < count; i++) printf("%02x", ((const unsigned char*)start)[i]);
}

CUresult cuInit(unsigned flags) {
  printf("init %u\n", flags);
  return result("cuInit");
}

CUresult cuCtxGetDevice(CUdevice* device) {
  *device = setting("FAKE_DEVICE", 0);
  return result("cuCtxGetDevice");
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  const int capability = setting("FAKE_CAPABILITY", 90);
  (void)device;
  *value = attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT       ? 132
           : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? capability / 10
                                                                       : capability % 10;
  return result("cuDeviceGetAttribute");
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  static _Thread_local CUstreamCaptureMode current = CU_STREAM_CAPTURE_MODE_GLOBAL;
  const CUstreamCaptureMode before = current;
  current = *mode;
  *mode = before;
  printf("capture %d\n", current);
  return result("cuThreadExchangeStreamCaptureMode");
}

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option* jit_options,
                           void** jit_values, unsigned jit_count, CUlibraryOption* options,
                           void** values, unsigned count) {
  (void)jit_options, (void)jit_values, (void)options, (void)values;
  flockfile(stdout);  // a line is several calls, of one thread
  printf("load %u %u ", jit_count, count);
  print_bytes(code, kernels[loaded].bytes);
  printf("\n");
  funlockfile(stdout);
  *library = (CUlibrary)(size_t)++loaded;
  return result("cuLibraryLoadData");
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  printf("kernel %d %s\n", (int)(size_t)library - 1, name);
  *kernel = (CUkernel)library;
  return result("cuLibraryGetKernel");
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel,
                              CUdevice device) {
  printf("attribute %d %d %d %d\n", (int)(size_t)kernel - 1, attribute, value, device);
  return result("cuKernelSetAttribute");
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* address, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  memset(map, 0xAB, sizeof *map);
  flockfile(stdout);  // a line is several calls, of one thread
  printf("map %d %u %zu %d %d %d %d", type, rank, (size_t)address, interleave, swizzle, promotion,
         fill);
  for (cuuint32_t i = 0; i < rank; i++) printf(" %zu %u %u", (size_t)sizes[i], box[i], steps[i]);
  for (cuuint32_t i = 0; i + 1 < rank; i++) printf(" %zu", (size_t)strides[i]);
  printf("\n");
  funlockfile(stdout);
  return result("cuTensorMapEncodeTiled");
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        CUstream stream, void** arguments, void** extra) {
  const int number = (int)(size_t)function - 1;
  flockfile(stdout);  // a line is several calls, of one thread
  printf("launch %d %u %u %u %u %u %u %u %zu %d", number, grid_x, grid_y, grid_z, block_x, block_y,
         block_z, shared_bytes, (size_t)stream, extra == NULL);
  for (int i = 0; i < kernels[number].count; i++) {
    printf(" ");
    print_bytes(arguments[i], kernels[number].sizes[i]);
  }
  printf("\n");
  funlockfile(stdout);
  return result("cuLaunchKernel");
}
