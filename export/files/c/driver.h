// CUDA's driver, opened at run time, and compiled kernels in it. Before this a file has
//   CAPABILITY_MAJOR, CAPABILITY_MINOR   of the GPU that the kernels are for
//   KERNEL_COUNT, KERNELS                and the initialiser of a Kernel for each
// and after it may call `prepare` and `launch`.
#pragma once

#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

// What functions return, as the export's header has it.
enum { OK, BAD_SIZE, BAD_ALIGNMENT, BAD_DEVICE, CUDA_ERROR };

// The code of what a call of the driver returned.
static int code_of(CUresult result) {
  return result == CUDA_SUCCESS ? OK : CUDA_ERROR + (int)result;
}

typedef struct {
  const unsigned char* code;  // an ELF file
  const char* function;
  unsigned threads;       // of a block
  unsigned shared_bytes;  // of a block, given at launch
} Kernel;

static const Kernel KERNEL_TABLE[KERNEL_COUNT] = {KERNELS};

// What is used of the driver. It is opened by the first call, so that this links and loads where
// there is none.
static struct {
  CUresult (*cuInit)(unsigned flags);
  CUresult (*cuCtxGetDevice)(CUdevice* device);
  CUresult (*cuDeviceGetAttribute)(int* value, CUdevice_attribute attribute, CUdevice device);
  CUresult (*cuThreadExchangeStreamCaptureMode)(CUstreamCaptureMode* mode);
  CUresult (*cuLibraryLoadData)(CUlibrary* library, const void* code, CUjit_option* jit_options,
                                void** jit_values, unsigned jit_count, CUlibraryOption* options,
                                void** values, unsigned count);
  CUresult (*cuLibraryGetKernel)(CUkernel* kernel, CUlibrary library, const char* name);
  CUresult (*cuKernelSetAttribute)(CUfunction_attribute attribute, int value, CUkernel kernel,
                                   CUdevice device);
  CUresult (*cuLaunchKernel)(CUfunction function, unsigned grid_x, unsigned grid_y,
                             unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                             unsigned shared_bytes, CUstream stream, void** arguments,
                             void** extra);
  CUresult (*cuTensorMapEncodeTiled)(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                     void* address, const cuuint64_t* sizes,
                                     const cuuint64_t* strides, const cuuint32_t* box,
                                     const cuuint32_t* steps, CUtensorMapInterleave interleave,
                                     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                     CUtensorMapFloatOOBfill fill);
} driver;

static pthread_once_t opened = PTHREAD_ONCE_INIT;
static int have_driver;
static CUresult init_result;
static pthread_once_t loaded = PTHREAD_ONCE_INIT;
static CUresult load_result;
static CUkernel handles[KERNEL_COUNT];

static int find(void* library, const char* name, void* function) {
  void* const symbol = dlsym(library, name);
  memcpy(function, &symbol, sizeof symbol);
  return symbol != NULL;
}

static void open_driver(void) {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  have_driver =
      library != NULL && find(library, "cuInit", &driver.cuInit) &&
      find(library, "cuCtxGetDevice", &driver.cuCtxGetDevice) &&
      find(library, "cuDeviceGetAttribute", &driver.cuDeviceGetAttribute) &&
      find(library, "cuThreadExchangeStreamCaptureMode",
           &driver.cuThreadExchangeStreamCaptureMode) &&
      find(library, "cuLibraryLoadData", &driver.cuLibraryLoadData) &&
      find(library, "cuLibraryGetKernel", &driver.cuLibraryGetKernel) &&
      find(library, "cuKernelSetAttribute", &driver.cuKernelSetAttribute) &&
      find(library, "cuTensorMapEncodeTiled", &driver.cuTensorMapEncodeTiled) &&
      find(library, "cuLaunchKernel", &driver.cuLaunchKernel);
  if (have_driver) init_result = driver.cuInit(0);
}

// Once for the process: this code belongs to no context, the driver puts it where it is launched.
static void load_kernels(void) {
  // This thread's stream may be in capture, where loading is forbidden unless one asks.
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  load_result = driver.cuThreadExchangeStreamCaptureMode(&mode);
  for (int i = 0; i < KERNEL_COUNT && load_result == CUDA_SUCCESS; i++) {
    CUlibrary library;
    load_result =
        driver.cuLibraryLoadData(&library, KERNEL_TABLE[i].code, NULL, NULL, 0, NULL, NULL, 0);
    if (load_result == CUDA_SUCCESS)
      load_result = driver.cuLibraryGetKernel(&handles[i], library, KERNEL_TABLE[i].function);
  }
  driver.cuThreadExchangeStreamCaptureMode(&mode);
}

static int prepare_device(CUdevice device) {
  int major, minor;
  CUresult result = driver.cuDeviceGetAttribute(
      &major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
  if (result == CUDA_SUCCESS)
    result = driver.cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                                         device);
  if (result != CUDA_SUCCESS) return code_of(result);
  if (major != CAPABILITY_MAJOR || minor != CAPABILITY_MINOR) return BAD_DEVICE;
  pthread_once(&loaded, load_kernels);
  result = load_result;
  for (int i = 0; i < KERNEL_COUNT && result == CUDA_SUCCESS; i++) {
    // What a block may have of it without asking.
    if (KERNEL_TABLE[i].shared_bytes > 48 << 10)
      result = driver.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                           (int)KERNEL_TABLE[i].shared_bytes, handles[i], device);
  }
  return code_of(result);
}

// Make sure that the kernels can be launched in the current context.
static int prepare(void) {
  static atomic_int known[64];  // for each device, 1 + its code; 0 before it was first asked
  pthread_once(&opened, open_driver);
  if (!have_driver) return CUDA_ERROR;
  CUdevice device;
  CUresult result = init_result;
  if (result == CUDA_SUCCESS) result = driver.cuCtxGetDevice(&device);
  if (result != CUDA_SUCCESS) return code_of(result);
  if (device >= 64) return prepare_device(device);
  int code = atomic_load(&known[device]) - 1;
  if (code < 0) {
    code = prepare_device(device);
    if (code < CUDA_ERROR) atomic_store(&known[device], code + 1);
  }
  return code;
}

static int launch(int kernel, unsigned x, unsigned y, unsigned z, CUstream stream,
                  void** arguments) {
  return code_of(driver.cuLaunchKernel((CUfunction)handles[kernel], x, y, z,
                                       KERNEL_TABLE[kernel].threads, 1, 1,
                                       KERNEL_TABLE[kernel].shared_bytes, stream, arguments, NULL));
}
