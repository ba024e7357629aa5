/* A stand-in for libcuda.so.1: just the calls in use, and strict where the real driver is strict.
 *
 * Memory is memfds, device addresses are addresses of this process: PROT_NONE until something is
 * mapped there and access was set, so an illegal access is a real SIGSEGV. (On the real thing the
 * host cannot touch device addresses at all, and the fault ends the context.) README.md lists what
 * is refused and how to configure it.
 */
#include "machine.h"
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr, CUhandle;
typedef struct { unsigned char bytes[16]; } CUuuid;
typedef struct { int type, id; } CUmemLocation;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
typedef struct {
    int type, requested_handle_types;
    CUmemLocation location;
    void *win32;
    unsigned char flags[8];
} CUmemAllocationProp;

#define ERRORS(X) \
    X(SUCCESS, 0) X(INVALID_VALUE, 1) X(OUT_OF_MEMORY, 2) X(NOT_INITIALIZED, 3) \
    X(STUB_LIBRARY, 34) X(NO_DEVICE, 100) X(INVALID_DEVICE, 101) X(INVALID_CONTEXT, 201) \
    X(ECC_UNCORRECTABLE, 214) X(OPERATING_SYSTEM, 304) X(INVALID_HANDLE, 400) \
    X(ILLEGAL_ADDRESS, 700) X(NOT_PERMITTED, 800) X(NOT_SUPPORTED, 801) \
    X(SYSTEM_NOT_READY, 802) X(SYSTEM_DRIVER_MISMATCH, 803) X(UNKNOWN, 999)
#define X(name, code) name = code,
enum { ERRORS(X) };
#undef X
enum { POSIX_FD = 1, PINNED = 1, ON_DEVICE = 1, CAN_READ = 1, CAN_WRITE = 3 };
enum { ATTRIBUTE_VMM = 102, ATTRIBUTE_POSIX_FD = 103 };
enum { DRIVER_VERSION = 13000 };

struct block { /* physical memory, as this process knows it: freed without handles and mappings */
    CUhandle handle;
    int fd, refs, mapped;
    uint64_t size;
    char uuid[NAME_MAX_BYTES];
    struct block *next;
};
struct span { /* a reservation (block == NULL) or a mapping */
    uint64_t start, size;
    struct block *block;
    struct span *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool ready;
static struct device visible[DEVICES_MAX];
static char parents[DEVICES_MAX][NAME_MAX_BYTES]; /* what cuDeviceGetUuid's first version says */
static int visible_count;
static int contexts[DEVICES_MAX]; /* how often the primary context is retained */
static __thread int current = -1; /* the device whose primary context is current */
static struct block *blocks;
static struct span *reservations, *mappings;
static CUhandle next_handle = 0x5a00;

/* -- failing on purpose: STANDIN_FAIL="cuMemMap:3:999" fails the third call, ":3+:" all from it */

static CUresult told_to_fail(const char *call) {
    static char text[512];
    static int calls[16];
    char copy[512], *at = copy, *rule;
    const char *now = setting("STANDIN_FAIL", "");
    if (strcmp(now, text)) { /* counting begins when the rules change */
        snprintf(text, sizeof text, "%s", now);
        memset(calls, 0, sizeof calls);
    }
    snprintf(copy, sizeof copy, "%s", text);
    for (int i = 0; i < 16 && (rule = strsep(&at, ",")); i++) {
        char *name = strsep(&rule, ":"), *nth = strsep(&rule, ":");
        if (!nth || !rule || strcmp(name, call)) continue;
        int n = ++calls[i], wanted = atoi(nth);
        if (n == wanted || (n > wanted && strchr(nth, '+'))) return atoi(rule);
    }
    return SUCCESS;
}

static CUresult entered(const char *call, bool is_memory_call) {
    CUresult told = told_to_fail(call);
    if (told) return told;
    if (!ready) return NOT_INITIALIZED;
    if (is_memory_call && current < 0 && number("STANDIN_NEEDS_CONTEXT", 0)) return INVALID_CONTEXT;
    return SUCCESS;
}

/* Every call: count it, then do it alone. */
#define ENTER(is_memory_call) \
    __attribute__((cleanup(leave))) pthread_mutex_t *held = &lock; \
    pthread_mutex_lock(held); \
    do { \
        CUresult entry = entered(__func__, is_memory_call); \
        if (entry) return entry; \
    } while (0)
#define REFUSE_IF(wrong, code) do { if (wrong) return code; } while (0)

static void leave(pthread_mutex_t **held) { pthread_mutex_unlock(*held); }

/* -- devices */

static void show(const struct device *all, int index) {
    int shown = all[index].instances ? index + 1 : index; /* MIG mode: only an instance computes */
    int parent = all[shown].parent;
    if (parent >= 0) /* a process sees one MIG instance at most */
        for (int i = 0; i < visible_count; i++)
            if (visible[i].parent >= 0) return;
    snprintf(parents[visible_count], NAME_MAX_BYTES, "%s", all[parent < 0 ? shown : parent].uuid);
    visible[visible_count++] = all[shown];
}

/* GPUs in the order in which CUDA counts them, as indices into NVML's. */
static int cuda_order(const struct device *all, int count, int out[DEVICES_MAX]) {
    int gpus[DEVICES_MAX], found = 0, ordered = 0;
    for (int i = 0; i < count; i++)
        if (all[i].parent < 0) gpus[found++] = i;
    bool by_bus = !strcmp(setting("CUDA_DEVICE_ORDER", ""), "PCI_BUS_ID");
    char text[256], *at = text, *word;
    snprintf(text, sizeof text, "%s", by_bus ? "" : setting("STANDIN_CUDA_ORDER", ""));
    while (*text && (word = strsep(&at, ",")) && ordered < found) out[ordered++] = gpus[atoi(word)];
    for (int i = 0; !ordered && i < found; i++)
        out[i] = gpus[by_bus ? i : found - 1 - i];
    return found;
}

/* CUDA_VISIBLE_DEVICES: indices, UUIDs or their beginnings; what comes after a wrong one is hidden. */
static void look(void) {
    struct device all[DEVICES_MAX];
    int count = machine_devices(all), order[DEVICES_MAX], gpus = cuda_order(all, count, order);
    const char *chosen = getenv("CUDA_VISIBLE_DEVICES");
    char text[4096], *at = text, *word;
    visible_count = 0;
    for (int i = 0; !chosen && i < gpus; i++) show(all, order[i]);
    snprintf(text, sizeof text, "%s", chosen ? chosen : "");
    while (chosen && (word = strsep(&at, ","))) {
        int found = -1, matches = 0;
        if (isdigit(*word) && atoi(word) < gpus) found = order[atoi(word)], matches = 1;
        for (int i = 0; !isdigit(*word) && strlen(word) > 4 && i < count; i++)
            if (!strncmp(all[i].uuid, word, strlen(word))) found = i, matches++;
        if (matches != 1) return;
        show(all, found);
    }
}

static void uuid_bytes(const char *text, CUuuid *out) {
    int at = 0;
    memset(out, 0, sizeof *out);
    for (text += 4; *text && at < 32; text++) /* after "GPU-" or "MIG-" */
        if (isxdigit(*text)) {
            int digit = isdigit(*text) ? *text - '0' : tolower(*text) - 'a' + 10;
            out->bytes[at / 2] |= digit << (at % 2 ? 0 : 4), at++;
        }
}

static bool is_device(CUdevice device) { return device >= 0 && device < visible_count; }

CUresult cuInit(unsigned flags) {
    CUresult told = told_to_fail("cuInit");
    REFUSE_IF(told, told);
    REFUSE_IF(flags, INVALID_VALUE);
    if (!ready) look();
    REFUSE_IF(!visible_count, NO_DEVICE);
    ready = true;
    return SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    *version = number("STANDIN_DRIVER_VERSION", DRIVER_VERSION);
    return SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    ENTER(false);
    *count = visible_count;
    return SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(false);
    REFUSE_IF(!is_device(ordinal), INVALID_DEVICE);
    *device = ordinal;
    return SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER(false);
    REFUSE_IF(!is_device(device), INVALID_DEVICE);
    snprintf(name, length, "Stand-in");
    return SUCCESS;
}

/* The first version gives the GPU's even of a MIG instance; the second the instance's own. */
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    ENTER(false);
    REFUSE_IF(!is_device(device), INVALID_DEVICE);
    uuid_bytes(parents[device], uuid);
    return SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    ENTER(false);
    REFUSE_IF(!is_device(device), INVALID_DEVICE);
    uuid_bytes(visible[device].uuid, uuid);
    return SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    ENTER(false);
    REFUSE_IF(!is_device(device), INVALID_DEVICE);
    *bytes = machine_memory();
    return SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    ENTER(false);
    REFUSE_IF(!is_device(device), INVALID_DEVICE);
    REFUSE_IF(attribute != ATTRIBUTE_VMM && attribute != ATTRIBUTE_POSIX_FD, INVALID_VALUE);
    *value = !number("STANDIN_NO_VMM", 0);
    return SUCCESS;
}

/* -- contexts: only the primary one of each device; its pointer is its device's number plus one */

CUresult cuDevicePrimaryCtxRetain(void **context, CUdevice device) {
    ENTER(false);
    REFUSE_IF(!is_device(device), INVALID_DEVICE);
    contexts[device]++;
    *context = (void *)(intptr_t)(device + 1);
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER(false);
    REFUSE_IF(!is_device(device), INVALID_DEVICE);
    REFUSE_IF(!contexts[device], INVALID_CONTEXT);
    contexts[device]--;
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    ENTER(false);
    REFUSE_IF(!is_device(device), INVALID_DEVICE);
    *flags = 0, *active = contexts[device] > 0;
    return SUCCESS;
}

CUresult cuCtxSetCurrent(void *context) {
    ENTER(false);
    int device = (int)(intptr_t)context - 1;
    REFUSE_IF(context && (!is_device(device) || !contexts[device]), INVALID_CONTEXT);
    current = device;
    return SUCCESS;
}

CUresult cuCtxGetCurrent(void **context) {
    ENTER(false);
    *context = (void *)(intptr_t)(current + 1);
    return SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    ENTER(false);
    REFUSE_IF(current < 0, INVALID_CONTEXT);
    return SUCCESS;
}

/* -- physical memory */

static bool is_whole(uint64_t value) { return value && value % machine_granularity() == 0; }

static struct block *block_of(CUhandle handle) {
    for (struct block *b = blocks; b; b = b->next)
        if (b->handle == handle && b->refs > 0) return b;
    return NULL;
}

static CUhandle add_block(int fd, uint64_t size, const char *uuid) {
    struct block *b = calloc(1, sizeof *b);
    *b = (struct block){.handle = next_handle++, .fd = fd, .refs = 1, .size = size, .next = blocks};
    snprintf(b->uuid, sizeof b->uuid, "%s", uuid);
    blocks = b;
    return b->handle;
}

static void drop_if_unused(struct block *unused) {
    if (unused->refs || unused->mapped) return;
    struct block **at = &blocks;
    while (*at != unused) at = &(*at)->next;
    *at = unused->next;
    close(unused->fd);
    free(unused);
}

static CUresult check_prop(const CUmemAllocationProp *prop) {
    bool is_known = prop->type == PINNED && prop->location.type == ON_DEVICE;
    REFUSE_IF(!is_known || (prop->requested_handle_types & ~POSIX_FD), INVALID_VALUE);
    REFUSE_IF(!is_device(prop->location.id), INVALID_DEVICE);
    return SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *prop, int option) {
    ENTER(false);
    (void)option;
    CUresult wrong = check_prop(prop);
    REFUSE_IF(wrong, wrong);
    *out = machine_granularity();
    return SUCCESS;
}

CUresult cuMemCreate(CUhandle *out, size_t size, const CUmemAllocationProp *prop,
                     unsigned long long flags) {
    ENTER(true);
    CUresult wrong = check_prop(prop);
    REFUSE_IF(wrong, wrong);
    REFUSE_IF(flags || !is_whole(size), INVALID_VALUE);
    const char *uuid = visible[prop->location.id].uuid;
    bool is_limited = getenv("STANDIN_MEMORY"); /* looking through /proc takes milliseconds */
    REFUSE_IF(is_limited && machine_used(uuid) + size > machine_memory(), OUT_OF_MEMORY);
    char name[2 * NAME_MAX_BYTES];
    snprintf(name, sizeof name, "standin:%s:%s:%zu", machine_name(), uuid, size);
    int fd = memfd_create(name, MFD_CLOEXEC);
    REFUSE_IF(fd < 0, OPERATING_SYSTEM);
    if (ftruncate(fd, size)) {
        close(fd);
        return OUT_OF_MEMORY;
    }
    *out = add_block(fd, size, uuid);
    return SUCCESS;
}

CUresult cuMemRelease(CUhandle handle) {
    ENTER(true);
    struct block *b = block_of(handle);
    REFUSE_IF(!b, INVALID_VALUE);
    b->refs--;
    drop_if_unused(b);
    return SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUhandle *out, void *address) {
    ENTER(true);
    for (struct span *m = mappings; m; m = m->next)
        if ((uint64_t)address - m->start < m->size) {
            m->block->refs++;
            *out = m->block->handle;
            return SUCCESS;
        }
    return INVALID_VALUE;
}

CUresult cuMemExportToShareableHandle(void *out, CUhandle handle, int type,
                                      unsigned long long flags) {
    ENTER(true);
    struct block *b = block_of(handle);
    REFUSE_IF(!b || type != POSIX_FD || flags, INVALID_VALUE);
    int fd = dup(b->fd); /* as the real driver's: not close-on-exec */
    REFUSE_IF(fd < 0, OPERATING_SYSTEM);
    *(int *)out = fd;
    return SUCCESS;
}

/* Only our own memory, on a device that this process sees, may come in by a descriptor. */
CUresult cuMemImportFromShareableHandle(CUhandle *out, void *os_handle, int type) {
    ENTER(true);
    char path[64], name[2 * NAME_MAX_BYTES], wanted[NAME_MAX_BYTES];
    int fd = (int)(intptr_t)os_handle;
    REFUSE_IF(type != POSIX_FD, INVALID_VALUE);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(path, name, sizeof name - 1);
    REFUSE_IF(length <= 0, INVALID_VALUE);
    name[length] = 0;
    snprintf(wanted, sizeof wanted, "/memfd:standin:%s:", machine_name());
    REFUSE_IF(strncmp(name, wanted, strlen(wanted)), INVALID_VALUE);
    char *size = name + strlen(wanted), *uuid = strsep(&size, ":");
    for (int i = 0; i < visible_count; i++)
        if (!strcmp(visible[i].uuid, uuid)) {
            int mine = fcntl(fd, F_DUPFD_CLOEXEC, 0);
            REFUSE_IF(mine < 0, OPERATING_SYSTEM);
            *out = add_block(mine, strtoull(size, NULL, 10), uuid);
            return SUCCESS;
        }
    return INVALID_DEVICE;
}

/* -- addresses */

static void add_span(struct span **list, uint64_t start, uint64_t size, struct block *block) {
    struct span *s = calloc(1, sizeof *s);
    *s = (struct span){.start = start, .size = size, .block = block, .next = *list};
    *list = s;
}

static bool overlaps(const struct span *s, uint64_t start, uint64_t size) {
    return s->start < start + size && start < s->start + s->size;
}

/* Whether whole mappings, side by side, are all that lies in the range. */
static bool is_all_mapped(uint64_t start, uint64_t size) {
    uint64_t covered = 0;
    for (struct span *m = mappings; m; m = m->next) {
        if (!overlaps(m, start, size)) continue;
        if (m->start < start || m->start + m->size > start + size) return false;
        covered += m->size;
    }
    return size && covered == size;
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
    ENTER(true);
    (void)hint;
    uint64_t step = machine_granularity(), room = size + step;
    REFUSE_IF(flags || !is_whole(size) || (alignment & (alignment - 1)), INVALID_VALUE);
    int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *found = mmap(NULL, room, PROT_NONE, kind, -1, 0);
    REFUSE_IF(found == MAP_FAILED, OUT_OF_MEMORY);
    uint64_t start = ((uint64_t)found + step - 1) / step * step, before = start - (uint64_t)found;
    if (before) munmap(found, before);
    if (before < step) munmap((void *)(start + size), step - before);
    add_span(&reservations, start, size, NULL);
    *out = start;
    return SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr start, size_t size) {
    ENTER(true);
    for (struct span *m = mappings; m; m = m->next) REFUSE_IF(overlaps(m, start, size), INVALID_VALUE);
    for (struct span **at = &reservations; *at; at = &(*at)->next)
        if ((*at)->start == start && (*at)->size == size) {
            struct span *gone = *at;
            *at = gone->next;
            free(gone);
            munmap((void *)start, size);
            return SUCCESS;
        }
    return INVALID_VALUE;
}

CUresult cuMemMap(CUdeviceptr start, size_t size, size_t offset, CUhandle handle,
                  unsigned long long flags) {
    ENTER(true);
    struct block *b = block_of(handle);
    bool is_reserved = false;
    for (struct span *r = reservations; r; r = r->next)
        is_reserved |= start >= r->start && start + size <= r->start + r->size;
    REFUSE_IF(!b || flags || offset || size != b->size, INVALID_VALUE); /* whole or not at all */
    REFUSE_IF(!is_reserved || start % machine_granularity(), INVALID_VALUE);
    for (struct span *m = mappings; m; m = m->next) REFUSE_IF(overlaps(m, start, size), INVALID_VALUE);
    int how = MAP_SHARED | MAP_FIXED;
    REFUSE_IF(mmap((void *)start, size, PROT_NONE, how, b->fd, 0) == MAP_FAILED, OPERATING_SYSTEM);
    b->mapped++;
    add_span(&mappings, start, size, b);
    return SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr start, size_t size) {
    ENTER(true);
    REFUSE_IF(!is_all_mapped(start, size), INVALID_VALUE);
    int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    for (struct span **at = &mappings; *at;) {
        struct span *m = *at;
        if (!overlaps(m, start, size)) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        if (mmap((void *)m->start, m->size, PROT_NONE, kind, -1, 0) == MAP_FAILED) abort();
        m->block->mapped--;
        drop_if_unused(m->block);
        free(m);
    }
    return SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr start, size_t size, const CUmemAccessDesc *desc, size_t count) {
    ENTER(true);
    REFUSE_IF(count != 1 || desc->location.type != ON_DEVICE, INVALID_VALUE);
    REFUSE_IF(!is_device(desc->location.id), INVALID_DEVICE);
    REFUSE_IF(!is_all_mapped(start, size), INVALID_VALUE);
    REFUSE_IF(desc->flags && desc->flags != CAN_READ && desc->flags != CAN_WRITE, INVALID_VALUE);
    for (struct span *m = mappings; m; m = m->next) /* no device reaches another's memory here */
        REFUSE_IF(overlaps(m, start, size) && strcmp(m->block->uuid, visible[desc->location.id].uuid),
                  INVALID_DEVICE);
    int can = (desc->flags & 1 ? PROT_READ : 0) | (desc->flags & 2 ? PROT_WRITE : 0);
    for (struct span *m = mappings; m; m = m->next)
        if (overlaps(m, start, size) && mprotect((void *)m->start, m->size, can)) return UNKNOWN;
    return SUCCESS;
}

/* -- bytes: these need a current context always, as on the real thing */

static CUresult check_copy(uint64_t start, size_t size) {
    REFUSE_IF(current < 0, INVALID_CONTEXT);
    for (struct span *r = reservations; r; r = r->next)
        if (start >= r->start && start + size <= r->start + r->size) return SUCCESS;
    return INVALID_VALUE;
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) {
    ENTER(false);
    CUresult wrong = check_copy(from, size);
    if (!wrong) memcpy(to, (void *)from, size);
    return wrong;
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size) {
    ENTER(false);
    CUresult wrong = check_copy(to, size);
    if (!wrong) memcpy((void *)to, from, size);
    return wrong;
}

CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count) {
    ENTER(false);
    CUresult wrong = check_copy(to, 4 * count);
    for (size_t i = 0; !wrong && i < count; i++) ((unsigned *)to)[i] = value;
    return wrong;
}

/* -- how callers find all this */

CUresult cuGetErrorName(CUresult error, const char **out) {
#define X(name, code) if (error == code) return *out = code ? "CUDA_ERROR_" #name : "CUDA_SUCCESS", 0;
    ERRORS(X)
#undef X
    return *out = NULL, INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **out) { return cuGetErrorName(error, out); }

CUresult cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);

#define CALLS(C) \
    C(cuInit) C(cuDriverGetVersion) C(cuGetErrorName) C(cuGetErrorString) C(cuDeviceGetCount) \
    C(cuDeviceGet) C(cuDeviceGetName) C(cuDeviceGetAttribute) C(cuDevicePrimaryCtxRetain) \
    C(cuDevicePrimaryCtxGetState) C(cuCtxSetCurrent) C(cuCtxGetCurrent) C(cuCtxSynchronize) \
    C(cuMemGetAllocationGranularity) C(cuMemCreate) C(cuMemRelease) C(cuMemMap) C(cuMemUnmap) \
    C(cuMemRetainAllocationHandle) C(cuMemExportToShareableHandle) C(cuMemSetAccess) \
    C(cuMemImportFromShareableHandle) C(cuMemAddressReserve) C(cuMemAddressFree)
#define CALLS_V2(C) \
    C(cuDeviceTotalMem) C(cuDevicePrimaryCtxRelease) C(cuMemcpyDtoH) C(cuMemcpyHtoD) \
    C(cuMemsetD32) C(cuGetProcAddress)

CUresult cuGetProcAddress_v2(const char *symbol, void **out, int version, uint64_t flags,
                             int *status) {
    (void)flags;
    *out = NULL;
#define C(name) if (!strcmp(symbol, #name)) *out = (void *)name;
    CALLS(C)
#undef C
#define C(name) if (!strcmp(symbol, #name) || !strcmp(symbol, #name "_v2")) *out = (void *)name##_v2;
    CALLS_V2(C)
#undef C
    if (!strcmp(symbol, "cuDeviceGetUuid"))
        *out = version >= 11040 ? (void *)cuDeviceGetUuid_v2 : (void *)cuDeviceGetUuid;
    if (!strcmp(symbol, "cuDeviceGetUuid_v2")) *out = (void *)cuDeviceGetUuid_v2;
    if (status) *status = *out ? 0 : 1;
    return *out ? SUCCESS : 500; /* CUDA_ERROR_NOT_FOUND */
}
