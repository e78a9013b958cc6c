/* CUDA and NCCL for a machine that has no GPU, as far as TensorFlow asks for them.

   A card's memory is the process's own, and what is put into a stream happens at once. Messages
   between processes go through shared memory, as NCCL's would: the ranks of a communicator must
   call alike and hand over bytes of their own card, and the sums are real. Kernels are code for a
   GPU and cannot run: kernels.cc lets TensorFlow compute with those for the CPU, and the launch of
   any other ends the process with its name, so that nothing wrong is ever computed.

   PRETENDED_GPUS     how many cards there are
   pretended_counts   messages and values by NCCL so far, and bytes from and to the host */

#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#define DONE(name, ...) CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }

static void stop(const char *what, const char *name) {
  fprintf(stderr, "pretended CUDA: %s %s\n", what, name);
  fflush(stderr);
  abort(); /* with PYTHONFAULTHANDLER=1, Python says where */
}
enum { MESSAGES, VALUES, TO_HOST, TO_CARD };
static atomic_long counts[4];
void pretended_counts(long *found) {
  for (int i = 0; i < 4; ++i) found[i] = atomic_load(&counts[i]);
}
static int cards(void) {
  const char *given = getenv("PRETENDED_GPUS");
  return given ? atoi(given) : 1;
}
/* CUDA_VISIBLE_DEVICES, as far as dtk sets it: a list of numbers, or empty. */
static int visible(int *numbers) {
  const char *given = getenv("CUDA_VISIBLE_DEVICES");
  int count = 0;
  if (!given) {
    for (; count < cards(); ++count) numbers[count] = count;
    return count;
  }
  for (char *end; *given; given = *end ? end + 1 : end) {
    long number = strtol(given, &end, 10);
    if (end == given || number < 0 || number >= cards()) break;
    numbers[count++] = (int)number;
  }
  return count;
}

/* The driver. */

static __thread CUcontext current;
static int numbers[64];
static size_t used[64];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
#define MEMORY ((size_t)1 << 30)

/* Kernels must be there before the first device is made, and after TensorFlow's own. */
CUresult cuInit(unsigned int flags) {
  static int loaded;
  Dl_info here;
  char path[4096];
  if (loaded++) return CUDA_SUCCESS;
  dladdr((void *)cuInit, &here);
  snprintf(path, sizeof path, "%.*s/kernels.so", (int)(strrchr(here.dli_fname, '/') - here.dli_fname),
           here.dli_fname);
  if (!dlopen(path, RTLD_NOW)) stop("cannot load", dlerror());
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *version) { return *version = 12050, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = visible(numbers), CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDeviceGetName(char *name, int len, CUdevice device) {
  return snprintf(name, len, "pretended card"), CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
  memset(uuid, 0, sizeof *uuid);
  uuid->bytes[0] = numbers[device];
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) { return cuDeviceGetUuid(uuid, device); }
CUresult cuDeviceGetPCIBusId(char *id, int len, CUdevice device) {
  return snprintf(id, len, "0000:%02x:00.0", numbers[device] + 1), CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
  return *bytes = MEMORY, CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 8; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = 65535; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 48 << 10; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = 1 << 20; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 1000000; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 128; break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: *value = 1; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}
CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
  return *can = 1, CUDA_SUCCESS;
}
CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute a, CUdevice one, CUdevice two) {
  return *value = 1, CUDA_SUCCESS;
}
DONE(cuDevicePrimaryCtxSetFlags_v2, CUdevice device, unsigned int flags)
DONE(cuDevicePrimaryCtxRelease_v2, CUdevice device)
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  return *context = (CUcontext)(size_t)(device + 1), CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
  return *flags = 0, *active = 1, CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = current, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return current = context, CUDA_SUCCESS; }
CUresult cuCtxPushCurrent_v2(CUcontext context) { return current = context, CUDA_SUCCESS; }
CUresult cuCtxPopCurrent_v2(CUcontext *context) { return *context = current, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) {
  return *device = current ? (int)(size_t)current - 1 : 0, CUDA_SUCCESS;
}
CUresult cuCtxGetApiVersion(CUcontext context, unsigned int *version) {
  return *version = 3020, CUDA_SUCCESS;
}
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  return *least = *greatest = 0, CUDA_SUCCESS;
}
DONE(cuCtxEnablePeerAccess, CUcontext peer, unsigned int flags)
DONE(cuCtxSynchronize, void)
DONE(cuCtxSetSharedMemConfig, CUsharedconfig config)
CUresult cuGetErrorName(CUresult error, const char **name) {
  return *name = "an error of the pretended card", CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) { return cuGetErrorName(error, text); }

/* The management library. */

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned len) {
  return snprintf(text, len, "555.42.02"), 0;
}

/* Memory. */

static struct block { char *at; size_t bytes; int card; struct block *next; } *blocks;

CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t bytes) {
  struct block *block = malloc(sizeof *block);
  cuCtxGetDevice(&block->card);
  pthread_mutex_lock(&lock);
  block->at = MAP_FAILED;
  if (used[block->card] + bytes <= MEMORY) /* taken from the machine only where it is written */
    block->at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (block->at == MAP_FAILED) {
    pthread_mutex_unlock(&lock);
    free(block);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  used[block->card] += block->bytes = bytes;
  block->next = blocks;
  blocks = block;
  pthread_mutex_unlock(&lock);
  return *at = (CUdeviceptr)block->at, CUDA_SUCCESS;
}
CUresult cuMemFree_v2(CUdeviceptr at) {
  pthread_mutex_lock(&lock);
  for (struct block **here = &blocks, *block; (block = *here); here = &block->next)
    if (block->at == (char *)at) {
      used[block->card] -= block->bytes;
      *here = block->next;
      munmap(block->at, block->bytes);
      free(block);
      break;
    }
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}
/* The card whose bytes these are, or -1: what a rank hands to NCCL must be a card's. */
static int card_of(const void *at) {
  int found = -1;
  pthread_mutex_lock(&lock);
  for (struct block *block = blocks; block && found < 0; block = block->next)
    if ((char *)at >= block->at && (char *)at < block->at + block->bytes) found = block->card;
  pthread_mutex_unlock(&lock);
  return found;
}
CUresult cuMemGetInfo_v2(size_t *left, size_t *all) {
  return *all = MEMORY, *left = MEMORY - used[current ? (size_t)current - 1 : 0], CUDA_SUCCESS;
}
CUresult cuMemHostAlloc(void **at, size_t bytes, unsigned int flags) {
  return posix_memalign(at, 256, bytes ? bytes : 1) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult cuMemFreeHost(void *at) { return free(at), CUDA_SUCCESS; }
DONE(cuMemHostRegister_v2, void *at, size_t bytes, unsigned int flags)
DONE(cuMemHostUnregister, void *at)
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *card, void *host, unsigned int flags) {
  return *card = (CUdeviceptr)host, CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr at) {
  pthread_mutex_lock(&lock);
  for (struct block *block = blocks; block; block = block->next)
    if ((char *)at >= block->at && (char *)at < block->at + block->bytes) {
      *base = (CUdeviceptr)block->at;
      *bytes = block->bytes;
    }
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr at) {
  if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
    *(unsigned *)data = card_of((void *)at) < 0 ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
    /* A kernel for the CPU may answer with memory of its own, and its caller takes it for the card's. */
    *(int *)data = card_of((void *)at) >= 0 ? card_of((void *)at) : (int)(size_t)current - 1;
  else
    return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}
static CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  if (card_of((void *)from) >= 0 && card_of((void *)to) < 0) counts[TO_HOST] += bytes;
  if (card_of((void *)from) < 0 && card_of((void *)to) >= 0) counts[TO_CARD] += bytes;
  return memmove((void *)to, (void *)from, bytes), CUDA_SUCCESS;
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
  return copy(to, (CUdeviceptr)from, bytes);
}
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
  return copy((CUdeviceptr)to, from, bytes);
}
CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copy(to, from, bytes);
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
  return copy(to, (CUdeviceptr)from, bytes);
}
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy((CUdeviceptr)to, from, bytes);
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy(to, from, bytes);
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy(to, from, bytes);
}
CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext one, CUdeviceptr from, CUcontext two,
                           size_t bytes, CUstream stream) {
  return copy(to, from, bytes);
}
CUresult cuMemsetD8_v2(CUdeviceptr at, unsigned char value, size_t count) {
  return memset((void *)at, value, count), CUDA_SUCCESS;
}
CUresult cuMemsetD32_v2(CUdeviceptr at, unsigned int value, size_t count) {
  for (size_t i = 0; i < count; ++i) ((unsigned *)at)[i] = value;
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t count, CUstream stream) {
  return cuMemsetD8_v2(at, value, count);
}
CUresult cuMemsetD32Async(CUdeviceptr at, unsigned int value, size_t count, CUstream stream) {
  return cuMemsetD32_v2(at, value, count);
}

/* Streams: everything in them has happened. */

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
  return *stream = malloc(1), CUDA_SUCCESS;
}
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
  return cuStreamCreate(stream, flags);
}
DONE(cuStreamDestroy_v2, CUstream stream)
DONE(cuStreamSynchronize, CUstream stream)
DONE(cuStreamQuery, CUstream stream)
DONE(cuStreamWaitEvent, CUstream stream, CUevent event, unsigned int flags)
CUresult cuStreamGetPriority(CUstream stream, int *priority) {
  return *priority = 0, CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
  return *context = current, CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) { return CUDA_SUCCESS; }
CUresult cuEventCreate(CUevent *event, unsigned int flags) {
  return *event = malloc(1), CUDA_SUCCESS;
}
DONE(cuEventDestroy_v2, CUevent event)
DONE(cuEventRecord, CUevent event, CUstream stream)
DONE(cuEventQuery, CUevent event)
DONE(cuEventSynchronize, CUevent event)
CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to) { return *ms = 0, CUDA_SUCCESS; }
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn call, void *data) {
  return call(data), CUDA_SUCCESS;
}
CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback call, void *data, unsigned int f) {
  return call(stream, CUDA_SUCCESS, data), CUDA_SUCCESS;
}

/* Kernels: known by name, never run. */

static struct kernel { const void *symbol; char *name; struct kernel *next; } *kernels;

static const char *named(const void *symbol) {
  for (struct kernel *one = kernels; one; one = one->next)
    if (one->symbol == symbol) return one->name;
  return "of no name";
}
static void keep(const void *symbol, const char *name) {
  struct kernel *one = malloc(sizeof *one);
  one->symbol = symbol;
  one->name = strdup(name);
  one->next = kernels;
  kernels = one;
}
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count,
                            CUjit_option *options, void **values) {
  return *module = malloc(1), CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  return *module = malloc(1), CUDA_SUCCESS;
}
CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image) {
  return *module = malloc(1), CUDA_SUCCESS;
}
DONE(cuModuleUnload, CUmodule module)
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = malloc(1);
  pthread_mutex_lock(&lock);
  keep(*function, name);
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  return *value = 0, CUDA_SUCCESS;
}
DONE(cuFuncSetCacheConfig, CUfunction function, CUfunc_cache config)
CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, CUstream stream, void **values,
                        void **extra) {
  stop("cannot run the kernel", named(function));
  return CUDA_ERROR_LAUNCH_FAILED;
}

/* The runtime. */

void **__cudaRegisterFatBinary(void *binary) { return malloc(sizeof(void *)); }
void __cudaRegisterFatBinaryEnd(void **binary) {}
void __cudaUnregisterFatBinary(void **binary) {}
void __cudaRegisterFunction(void **binary, const char *symbol, char *name, const char *device_name,
                            int limit, void *tid, void *bid, void *block, void *grid, int *size) {
  keep(symbol, device_name);
}
void __cudaRegisterVar(void **binary, char *at, char *address, const char *name, int ext,
                       size_t size, int constant, int global) {}
static __thread struct { dim3 grid, block; size_t shared; void *stream; } call;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  call.grid = grid, call.block = block, call.shared = shared, call.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = call.grid, *block = call.block, *shared = call.shared, *(void **)stream = call.stream;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *symbol, dim3 grid, dim3 block, void **values,
                             size_t shared, cudaStream_t stream) {
  stop("cannot run the kernel", named(symbol));
  return cudaErrorLaunchFailure;
}
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = 12050, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = 12050, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count) { return *count = visible(numbers), cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return cuCtxGetDevice(device), cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  return current = (CUcontext)(size_t)(device + 1), cudaSuccess;
}
cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *properties, int device) {
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "pretended card");
  properties->major = 9;
  properties->multiProcessorCount = 8;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->sharedMemPerBlock = 48 << 10;
  properties->totalGlobalMem = MEMORY;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  return cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, device), cudaSuccess;
}
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t error) { return "an error of the pretended card"; }
const char *cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
cudaError_t cudaFree(void *at) { return cuMemFree_v2((CUdeviceptr)at), cudaSuccess; }
cudaError_t cudaMalloc(void **at, size_t bytes) {
  return (cudaError_t)cuMemAlloc_v2((CUdeviceptr *)at, bytes);
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t count, cudaStream_t stream) {
  return memset(at, value, count), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return memmove(to, from, bytes), cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }

/* NCCL. A communicator is a file in shared memory: a barrier, and a piece of each rank's values. */

#define PIECE ((size_t)1 << 20)
#define PATIENCE 60 /* seconds for the others, then an error */

#define MOST 16 /* ranks */

struct shared {
  atomic_uint arrived, turn;
  atomic_int opened;
  struct { atomic_size_t count; atomic_int kind, type; } told[MOST];
  char pieces[][PIECE];
};
struct ncclComm {
  int size, rank, device;
  struct shared *shared;
};

ncclResult_t ncclGetVersion(int *version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess ? "no error" : "the ranks waited for each other too long";
}
const char *ncclGetLastError(ncclComm_t communicator) { return ""; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "/pretended-nccl-%d-%ld", getpid(), now.tv_nsec);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t *made, int size, ncclUniqueId id, int rank) {
  struct ncclComm *one = malloc(sizeof *one);
  size_t bytes = sizeof(struct shared) + size * PIECE;
  if (size > MOST) stop("NCCL cannot join", "so many ranks");
  int file = shm_open(id.internal, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, bytes)) return ncclSystemError;
  one->shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (one->shared == MAP_FAILED) return ncclSystemError;
  if (atomic_fetch_add(&one->shared->opened, 1) + 1 == size) shm_unlink(id.internal);
  one->size = size;
  one->rank = rank;
  cuCtxGetDevice(&one->device);
  return *made = one, ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *made, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
  return ncclCommInitRank(made, size, id, rank);
}
ncclResult_t ncclCommDestroy(ncclComm_t one) { return ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t one) { return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t one, ncclResult_t *error) {
  return *error = ncclSuccess, ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t one, int *count) {
  return *count = one->size, ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t one, int *rank) {
  return *rank = one->rank, ncclSuccess;
}

ncclResult_t ncclGroupStart(void) { return ncclSuccess; }
ncclResult_t ncclGroupEnd(void) { return ncclSuccess; }

static int barrier(struct ncclComm *one) {
  struct shared *shared = one->shared;
  unsigned turn = atomic_load(&shared->turn);
  if (atomic_fetch_add(&shared->arrived, 1) + 1 == (unsigned)one->size) {
    atomic_store(&shared->arrived, 0);
    atomic_fetch_add(&shared->turn, 1);
    return 1;
  }
  time_t end = time(NULL) + PATIENCE;
  while (atomic_load(&shared->turn) == turn) {
    if (time(NULL) > end) return 0;
    usleep(50);
  }
  return 1;
}
static size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 4;
  }
}
#define EACH(T, RESULT)                                      \
  for (size_t i = 0; i < count; ++i) {                       \
    T one = ((T *)to)[i], two = ((const T *)from)[i];        \
    ((T *)to)[i] = RESULT;                                   \
  }                                                          \
  break
#define COMBINE(T)                                           \
  switch (op) {                                              \
    case ncclSum: EACH(T, one + two);                        \
    case ncclProd: EACH(T, one * two);                       \
    case ncclMax: EACH(T, one > two ? one : two);            \
    case ncclMin: EACH(T, one < two ? one : two);            \
    default: stop("NCCL cannot reduce by", "this operation"); \
  }                                                          \
  break
static void combine(char *to, const char *from, size_t count, ncclDataType_t type, int op) {
  switch (type) {
    case ncclFloat16: COMBINE(_Float16);
    case ncclFloat32: COMBINE(float);
    case ncclFloat64: COMBINE(double);
    case ncclInt32: COMBINE(int);
    case ncclInt64: COMBINE(long long);
    default: stop("NCCL cannot reduce", "this type");
  }
}
enum { REDUCE, BROADCAST, GATHER };
static const char *const kinds[] = {"reduce", "broadcast", "gather"};

/* Piece by piece: each rank shows its values, all wait, each takes what it gets, all wait. */
static ncclResult_t message(struct ncclComm *one, int kind, const void *from, void *to,
                            size_t count, ncclDataType_t type, int op, int root) {
  struct shared *shared = one->shared;
  size_t width = bytes_of(type), step = PIECE / width, rest;
  if (count && (card_of(from) != one->device || card_of(to) != one->device)) stop("NCCL was given", "bytes that are not its card's");
  counts[MESSAGES] += 1;
  counts[VALUES] += count;
  atomic_store(&shared->told[one->rank].count, count);
  atomic_store(&shared->told[one->rank].kind, kind);
  atomic_store(&shared->told[one->rank].type, type);
  if (!barrier(one)) return ncclSystemError;
  for (int rank = 0; rank < one->size; ++rank)
    if (atomic_load(&shared->told[rank].count) != count ||
        atomic_load(&shared->told[rank].kind) != kind ||
        atomic_load(&shared->told[rank].type) != (int)type) {
      fprintf(stderr, "rank %d: %s of %zu values of type %d\n", one->rank, kinds[kind], count, type);
      stop("ranks came with", "different messages");
    }
  if (!barrier(one)) return ncclSystemError;
  char *sum = malloc(count * width);
  for (size_t at = 0; at < count; at += step) {
    rest = (count - at < step ? count - at : step);
    memcpy(shared->pieces[one->rank], (const char *)from + at * width, rest * width);
    if (!barrier(one)) return free(sum), ncclSystemError;
    if (kind == GATHER)
      for (int rank = 0; rank < one->size; ++rank)
        memcpy((char *)to + (rank * count + at) * width, shared->pieces[rank], rest * width);
    else if (kind == BROADCAST)
      memcpy((char *)to + at * width, shared->pieces[root], rest * width);
    else {
      memcpy(sum + at * width, shared->pieces[0], rest * width);
      for (int rank = 1; rank < one->size; ++rank)
        combine(sum + at * width, shared->pieces[rank], rest, type, op);
    }
    if (!barrier(one)) return free(sum), ncclSystemError;
  }
  if (kind == REDUCE) memcpy(to, sum, count * width);
  free(sum);
  return ncclSuccess;
}
ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t one, cudaStream_t stream) {
  return message(one, REDUCE, from, to, count, type, op, 0);
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t one, cudaStream_t stream) {
  return message(one, BROADCAST, one->rank == root ? from : to, to, count, type, 0, root);
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclComm_t one, cudaStream_t stream) {
  return message(one, GATHER, from, to, count, type, 0, 0);
}
