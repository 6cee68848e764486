/* A libcuda.so.1 without a GPU: it loads nothing, and records each launch with the bytes of its parameters.
 *
 * Triton's own host code is built against it, so a launch goes the whole way from Python to cuLaunchKernelEx.
 * A function is a number, by which the sizes of its parameters are registered first.
 */
#include <cuda.h>
#include <string.h>

#define MOST_FUNCTIONS 4096
#define MOST_PARAMETERS 64
#define MOST_LAUNCHES 65536

typedef struct {
  unsigned long long function, stream, shared_bytes, count;
  unsigned long long grid[3], block[3];
  unsigned long long parameters[MOST_PARAMETERS];
} Launch;

static unsigned long long functions = 0;
static int counts[MOST_FUNCTIONS];
static unsigned char sizes[MOST_FUNCTIONS][MOST_PARAMETERS];
static Launch launches[MOST_LAUNCHES];
static unsigned long long launched = 0, recording = 0;

void stand_in_register(unsigned long long function, int count, const unsigned char *bytes) {
  counts[function] = count;
  memcpy(sizes[function], bytes, count);
}
void stand_in_record(int is_on) { recording = is_on; launched = 0; }
unsigned long long stand_in_launched(void) { return launched; }
Launch *stand_in_launches(void) { return launches; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  unsigned long long number = (unsigned long long)function;
  if (number == 0 || number > functions) return CUDA_ERROR_INVALID_HANDLE;
  if (!recording) return CUDA_SUCCESS;
  if (launched == MOST_LAUNCHES) return CUDA_ERROR_OUT_OF_MEMORY;
  Launch *launch = &launches[launched++];
  memset(launch, 0, sizeof(*launch));
  launch->function = number;
  launch->stream = (unsigned long long)config->hStream;
  launch->shared_bytes = config->sharedMemBytes;
  launch->grid[0] = config->gridDimX; launch->grid[1] = config->gridDimY; launch->grid[2] = config->gridDimZ;
  launch->block[0] = config->blockDimX; launch->block[1] = config->blockDimY; launch->block[2] = config->blockDimZ;
  launch->count = counts[number];
  for (int i = 0; i < counts[number]; i++) memcpy(&launch->parameters[i], parameters[i], sizes[number][i]);
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)1; return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  if (functions + 1 == MOST_FUNCTIONS) return CUDA_ERROR_OUT_OF_MEMORY;
  *function = (CUfunction)(++functions);
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
  *clusters = 1;
  return CUDA_SUCCESS;
}
/* an H200's */
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 1;
  }
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "error of the stand-in"; return CUDA_SUCCESS; }
CUresult cuInit(unsigned int flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 12080; return CUDA_SUCCESS; }
/* none, so that nothing else in the process believes in a GPU */
CUresult cuDeviceGetCount(int *count) { *count = 0; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
    CUtensorMapFloatOOBfill fill) { return CUDA_ERROR_NOT_SUPPORTED; }
