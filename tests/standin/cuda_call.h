/* What every call of the driver's stand-in shares: types, codes, state, and failing on purpose. */
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
