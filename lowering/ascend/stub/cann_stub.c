/* The CANN functions that must answer something while torch_npu is imported and torchair converts a graph: there is one
 * device, of the 910B kind, and its memory is the host's. Whatever is not here returns 0, see environment.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define HANDLE(name, ...) \
  int name(void **handle, ##__VA_ARGS__) { return (*handle = calloc(1, 64)) == NULL; }
#define ALLOCATE(name, ...) \
  int name(void **memory, size_t size, ##__VA_ARGS__) { return posix_memalign(memory, 512, size ? size : 512); }
#define FREE(name) \
  int name(void *memory) { free(memory); return 0; }

const char *aclrtGetSocName(void) { return "Ascend910B1"; }
int aclrtGetDeviceCount(uint32_t *count) { *count = 1; return 0; }
int aclrtGetDevice(int32_t *device) { *device = 0; return 0; }
int aclrtGetCurrentContext(void **context) { static char only[64]; *context = only; return 0; }
int aclrtGetMemInfo(int kind, size_t *available, size_t *total) { *available = *total = (size_t)16 << 30; return 0; }

int aclsysGetCANNVersion(int package, char *version) { strcpy(version, "8.5.0"); return 0; }
int aclsysGetVersionStr(const char *package, char *version) { strcpy(version, "8.5.0"); return 0; }

size_t aclGetCompileoptSize(int option) { return sizeof "disable"; }
int aclGetCompileopt(int option, char *value, size_t size) { strncpy(value, "disable", size); return 0; }

HANDLE(aclrtCreateContext, int device)
HANDLE(aclrtCreateStream)
HANDLE(aclrtCreateStreamV2, void *config)
HANDLE(aclrtCreateStreamWithConfig, uint32_t priority, uint32_t flag)
HANDLE(aclrtCreateEvent)
HANDLE(aclrtCreateEventWithFlag, uint32_t flag)
HANDLE(aclrtCreateEventExWithFlag, uint32_t flag)

ALLOCATE(aclrtMalloc, int policy)
ALLOCATE(aclrtMallocAlign32, int policy)
ALLOCATE(aclrtMallocHost)
FREE(aclrtFree)
FREE(aclrtFreeHost)

int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) { memcpy(to, from, size); return 0; }
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
  memcpy(to, from, size);
  return 0;
}
int aclrtMemset(void *to, size_t room, int value, size_t size) { memset(to, value, size); return 0; }
int aclrtMemsetAsync(void *to, size_t room, int value, size_t size, void *stream) { memset(to, value, size); return 0; }

/* torch_npu and the CUDA of a torch that has it register the same names of allocator settings, which is an error. So the
 * registered names, a std::unordered_set, are forgotten when this library is loaded, right before torch_npu. */
#define GET_NAMES "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11Ev"
#define NAMES "_ZZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11EvE4keys" /* in torch 2.10 */
struct names { void **buckets; size_t bucket_count; void *first; size_t size; };
__attribute__((constructor)) static void forget_names(void) {
  void *torch = dlopen("libc10.so", RTLD_NOW | RTLD_NOLOAD);
  if (torch == NULL) return;
  struct names *(*get)(void) = (struct names *(*)(void))dlsym(torch, GET_NAMES);
  struct names *names = get != NULL ? get() : dlsym(torch, NAMES);
  if (names == NULL || names->buckets == NULL) return;
  memset(names->buckets, 0, names->bucket_count * sizeof *names->buckets);
  names->first = NULL;
  names->size = 0;
}
