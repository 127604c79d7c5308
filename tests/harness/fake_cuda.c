/* A stand-in for libcuda.so.1 that keeps "device memory" in memfds: a test aid.
 *
 * It implements the calls that the binding makes, with the driver's rules: sizes in granules, a
 * mapping is unreadable until access is set, handles, mappings and descriptors each keep the memory,
 * a context must be current, no process opens an IPC handle of its own pid. It is as unforgiving as
 * CUDA: memory freed under an importer's IPC mapping is truncated, so that the importer's next access
 * is a SIGBUS instead of undefined behaviour that happens to work. It counts what is alive, so that a test can see a
 * leak. The prototypes come from the binding's tests against cuda.h, not from here; the runtime's calls
 * behind IPC handles, which CuPy makes for us, are here too.
 *
 * Environment: FAKE_CUDA_DEVICES (1), FAKE_CUDA_MEMORY (bytes a device has; 1 GiB),
 * FAKE_CUDA_BATCH (1; 0: no batched copies), FAKE_CUDA_PEERS (1),
 * FAKE_CUDA_POSIX (1).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100,
       INVALID_DEVICE = 101, INVALID_CONTEXT = 201, NOT_FOUND = 500 };
enum { HANDLES, MAPPINGS, RESERVATIONS, PINNED, CONTEXTS, COUNTERS };
enum { GRANULE = 2 << 20, SLOTS = 4096, STACK = 16 };

typedef struct { int type, id; } Location;
typedef struct {
    int type, requested; Location location; void *win32;
    unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4];
} Prop;
typedef struct { Location location; int flags; } Access;
typedef struct { int order; Location src, dst; unsigned flags; } CopyAttributes;

static struct { int fd, device, ours; size_t size; } memory[SLOTS];
static struct Range { uintptr_t at; size_t size; int accessible; } range[SLOTS], piece[SLOTS], whole[SLOTS];
static int whole_fd[SLOTS];
static long live[COUNTERS];
static size_t used;
static int initialised;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread void *contexts[STACK];
static __thread int depth;

static long setting(const char *name, long fallback) {
    const char *text = getenv(name);
    return text ? atol(text) : fallback;
}
static int devices(void) { return (int)setting("FAKE_CUDA_DEVICES", 1); }

long fakeCudaLive(int what) { return what == CONTEXTS ? depth : live[what]; }

int cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    if (!devices()) return NO_DEVICE;
    initialised = 1;
    return SUCCESS;
}
int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuGetErrorName(int error, const char **name) {
    switch (error) {
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; break;
    case INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
    default: *name = NULL; return INVALID_VALUE;
    }
    return SUCCESS;
}
int cuDeviceGetCount(int *count) {
    *count = devices();
    return initialised ? SUCCESS : NOT_INITIALIZED;
}
int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal < devices() ? SUCCESS : INVALID_DEVICE;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 102 ? 1 : attribute == 103 ? (int)setting("FAKE_CUDA_POSIX", 1) : 0;
    return SUCCESS;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = (unsigned char)(16 * device + i);
    return SUCCESS;
}
int cuDeviceCanAccessPeer(int *can, int device, int peer) {
    (void)device, (void)peer;
    *can = (int)setting("FAKE_CUDA_PEERS", 1);
    return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(uintptr_t)(0x1000 + device);
    return SUCCESS;
}
int cuCtxPushCurrent_v2(void *context) {
    if (depth == STACK) return INVALID_VALUE;
    contexts[depth++] = context;
    return SUCCESS;
}
int cuCtxPopCurrent_v2(void **context) {
    if (!depth) return INVALID_CONTEXT;
    *context = contexts[--depth];
    return SUCCESS;
}

int cuMemGetAllocationGranularity(size_t *size, const Prop *prop, int option) {
    *size = GRANULE;
    return prop->type == 1 && option == 0 ? SUCCESS : INVALID_VALUE;
}
static int remember(unsigned long long *handle, int fd, int device, size_t size, int ours) {
    for (int i = 1; i < SLOTS; i++)
        if (!memory[i].size) {
            memory[i].fd = fd, memory[i].device = device, memory[i].size = size, memory[i].ours = ours;
            if (ours) used += size;
            live[HANDLES]++;
            *handle = (unsigned long long)i;
            return SUCCESS;
        }
    close(fd);
    return OUT_OF_MEMORY;
}
int cuMemCreate(unsigned long long *handle, size_t size, const Prop *prop, unsigned long long flags) {
    char name[32];
    if (!depth) return INVALID_CONTEXT;
    if (prop->type != 1 || prop->requested != 1 || prop->location.type != 1 || flags
        || prop->win32 || prop->compression || prop->rdma || prop->usage
        || !size || size % GRANULE || prop->location.id >= devices())
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    int result = OUT_OF_MEMORY;
    if (used + size <= (size_t)setting("FAKE_CUDA_MEMORY", 1L << 30)) {
        snprintf(name, sizeof name, "fake-cuda-%d", prop->location.id);
        int fd = memfd_create(name, MFD_CLOEXEC);
        if (fd >= 0 && ftruncate(fd, (off_t)size) == 0) {
            /* Not clean, as the driver's memory need not be. */
            if (pwrite(fd, "dirt", 4, 0) == 4)
                result = remember(handle, fd, prop->location.id, size, 1);
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}
int cuMemRelease(unsigned long long handle) {
    if (!handle || handle >= SLOTS || !memory[handle].size) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    close(memory[handle].fd);
    if (memory[handle].ours) used -= memory[handle].size;
    memory[handle].size = 0;
    live[HANDLES]--;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
int cuMemExportToShareableHandle(int *fd, unsigned long long handle, int type, unsigned long long flags) {
    if (type != 1 || flags || handle >= SLOTS || !memory[handle].size) return INVALID_VALUE;
    *fd = dup(memory[handle].fd); /* Inheritable on purpose: the binding must see to that. */
    return *fd < 0 ? OUT_OF_MEMORY : SUCCESS;
}
int cuMemImportFromShareableHandle(unsigned long long *handle, void *os_handle, int type) {
    int fd = (int)(intptr_t)os_handle, device;
    char path[64], target[64] = {0};
    struct stat status;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (type != 1 || readlink(path, target, sizeof target - 1) < 0
        || sscanf(target, "/memfd:fake-cuda-%d", &device) != 1 || fstat(fd, &status))
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    int result = remember(handle, fcntl(fd, F_DUPFD_CLOEXEC, 3), device, (size_t)status.st_size, 0);
    pthread_mutex_unlock(&lock);
    return result;
}
int cuMemGetAllocationPropertiesFromHandle(Prop *prop, unsigned long long handle) {
    if (handle >= SLOTS || !memory[handle].size) return INVALID_VALUE;
    memset(prop, 0, sizeof *prop);
    prop->type = prop->requested = prop->location.type = 1;
    prop->location.id = memory[handle].device;
    return SUCCESS;
}

static int find(const struct Range *among, uintptr_t at, size_t size) {
    for (int i = 1; i < SLOTS; i++)
        if (among[i].at == at && among[i].size == size) return i;
    return 0;
}
static int add(struct Range *to, uintptr_t at, size_t size) {
    for (int i = 1; i < SLOTS; i++)
        if (!to[i].at) {
            to[i].at = at, to[i].size = size, to[i].accessible = 0;
            return i;
        }
    return 0;
}
/* Whether the stretch lies within one reservation and meets no mapping. */
static int vacant(uintptr_t at, size_t size) {
    int within = 0;
    for (int i = 1; i < SLOTS; i++) {
        if (piece[i].at && piece[i].at < at + size && at < piece[i].at + piece[i].size) return 0;
        within |= range[i].at && range[i].at <= at && at + size <= range[i].at + range[i].size;
    }
    return within;
}
int cuMemAddressReserve(unsigned long long *at, size_t size, size_t align, unsigned long long hint, unsigned long long flags) {
    if (!size || size % GRANULE || align || hint || flags) return INVALID_VALUE;
    void *start = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    add(range, (uintptr_t)start, size);
    live[RESERVATIONS]++;
    pthread_mutex_unlock(&lock);
    *at = (uintptr_t)start;
    return SUCCESS;
}
int cuMemAddressFree(unsigned long long at, size_t size) {
    pthread_mutex_lock(&lock);
    int i = find(range, at, size), result = INVALID_VALUE;
    if (i && vacant(at, size)) {
        munmap((void *)at, size);
        range[i].at = 0;
        live[RESERVATIONS]--;
        result = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
int cuMemMap(unsigned long long at, size_t size, size_t offset, unsigned long long handle, unsigned long long flags) {
    pthread_mutex_lock(&lock);
    int result = INVALID_VALUE;
    if (vacant(at, size) && !offset && !flags && handle < SLOTS && memory[handle].size == size
        && mmap((void *)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory[handle].fd, 0) != MAP_FAILED) {
        add(piece, at, size);
        live[MAPPINGS]++;
        result = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
int cuMemUnmap(unsigned long long at, size_t size) {
    pthread_mutex_lock(&lock);
    int i = find(piece, at, size), result = INVALID_VALUE;
    if (i) {
        mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        piece[i].at = 0;
        live[MAPPINGS]--;
        result = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
int cuMemSetAccess(unsigned long long at, size_t size, const Access *access, size_t count) {
    pthread_mutex_lock(&lock);
    int i = find(piece, at, size), result = INVALID_VALUE;
    if (i && count == 1 && access->flags == 3 && access->location.type == 1
        && access->location.id < devices() && !mprotect((void *)at, size, PROT_READ | PROT_WRITE)) {
        piece[i].accessible = 1;
        result = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

typedef struct { char text[64]; } IpcHandle;
/* Puts a whole memfd behind a new address; `fd` is kept for memory of our own, -1 for another's. */
static int show(void **at, int of, int fd, size_t size) {
    void *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, of, 0);
    if (start == MAP_FAILED) return OUT_OF_MEMORY;
    madvise(start, size, MADV_DONTFORK);
    pthread_mutex_lock(&lock);
    int i = add(whole, (uintptr_t)start, size);
    whole_fd[i] = fd;
    live[MAPPINGS]++;
    pthread_mutex_unlock(&lock);
    *at = start;
    return SUCCESS;
}
/* The number of what starts at this address, and whether it is our own; 0 if nothing does. */
static int shown(uintptr_t at, int ours) {
    for (int i = 1; i < SLOTS; i++)
        if (whole[i].at == at && (whole_fd[i] >= 0) == ours) return i;
    return 0;
}
static int hide(void *at, int ours) {
    pthread_mutex_lock(&lock);
    int i = at ? shown((uintptr_t)at, ours) : 0;
    if (i) {
        munmap((void *)whole[i].at, whole[i].size);
        if (ours && ftruncate(whole_fd[i], 0) == 0) close(whole_fd[i]);
        whole[i].at = 0;
        live[MAPPINGS]--;
    }
    pthread_mutex_unlock(&lock);
    return i ? SUCCESS : INVALID_VALUE;
}
/* The runtime's five calls that CuPy makes for us; the runtime keeps a context of its own current. */
int cudaMalloc(void **at, size_t size) {
    if (size > (size_t)setting("FAKE_CUDA_MEMORY", 1L << 30)) return OUT_OF_MEMORY;
    int fd = memfd_create("fake-cuda-ipc", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size) || pwrite(fd, "dirt", 4, 0) != 4) return OUT_OF_MEMORY;
    return show(at, fd, fd, size);
}
int cudaFree(void *at) { return hide(at, 1); }
int cudaIpcGetMemHandle(IpcHandle *handle, void *at) {
    int i = shown((uintptr_t)at, 1);
    if (!i) return INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    snprintf(handle->text, sizeof handle->text, "%d %d", (int)getpid(), whole_fd[i]);
    return SUCCESS;
}
int cudaIpcOpenMemHandle(void **at, IpcHandle handle, unsigned flags) {
    int pid, number;
    char path[64];
    struct stat status;
    if (flags != 1 || sscanf(handle.text, "%d %d", &pid, &number) != 2) return INVALID_VALUE;
    if (pid == getpid()) return INVALID_CONTEXT;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, number);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return INVALID_VALUE;
    int result = fstat(fd, &status) ? INVALID_VALUE : show(at, fd, -1, (size_t)status.st_size);
    close(fd);
    return result;
}
int cudaIpcCloseMemHandle(void *at) { return hide(at, 0); }

int cuCtxSynchronize(void) { return depth ? SUCCESS : INVALID_CONTEXT; }
int cuStreamCreate(void **stream, unsigned flags) {
    *stream = (void *)0x2000;
    return !depth ? INVALID_CONTEXT : flags == 1 ? SUCCESS : INVALID_VALUE;
}
int cuStreamSynchronize(void *stream) { return stream ? SUCCESS : INVALID_VALUE; }
int cuMemsetD8Async(unsigned long long at, unsigned char value, size_t size, void *stream) {
    if (!depth) return INVALID_CONTEXT;
    if (!stream) return INVALID_VALUE;
    memset((void *)at, value, size);
    return SUCCESS;
}
int cuMemcpyAsync(unsigned long long dst, unsigned long long src, size_t size, void *stream) {
    if (!depth) return INVALID_CONTEXT;
    if (!stream) return INVALID_VALUE;
    memcpy((void *)dst, (void *)src, size);
    return SUCCESS;
}
int cuMemHostRegister_v2(void *at, size_t size, unsigned flags) {
    if (!depth) return INVALID_CONTEXT;
    if (!at || !size || flags != 1) return INVALID_VALUE;
    if (size > (size_t)setting("FAKE_CUDA_MEMORY", 1L << 30)) return OUT_OF_MEMORY;
    live[PINNED]++;
    return SUCCESS;
}
int cuMemHostUnregister(void *at) {
    if (!depth) return INVALID_CONTEXT;
    if (!at || !live[PINNED]) return INVALID_VALUE;
    live[PINNED]--;
    return SUCCESS;
}

static int copy_batch(
    const unsigned long long *dsts, const unsigned long long *srcs, const size_t *sizes, size_t count,
    const CopyAttributes *attributes, const size_t *first, size_t attribute_count, size_t *fail, void *stream) {
    *fail = SIZE_MAX;
    if (!depth) return INVALID_CONTEXT;
    if (!stream || !count || attribute_count != 1 || first[0] || attributes->order != 1) return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) memcpy((void *)dsts[i], (void *)srcs[i], sizes[i]);
    return SUCCESS;
}
int cuGetProcAddress_v2(const char *symbol, void **address, int version, uint64_t flags, int *status) {
    *address = NULL;
    if (strcmp(symbol, "cuMemcpyBatchAsync") || flags || version != 12080 || !setting("FAKE_CUDA_BATCH", 1)) {
        *status = 1;
        return NOT_FOUND;
    }
    *address = (void *)copy_batch;
    *status = 0;
    return SUCCESS;
}
