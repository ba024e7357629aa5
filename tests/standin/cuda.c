/* A stand-in for libcuda.so.1: just the calls in use, and strict where the real driver is strict.
 *
 * Memory is memfds, device addresses are addresses of this process: PROT_NONE until something is
 * mapped there and access was set, so an illegal access is a real SIGSEGV. (On the real thing the
 * host cannot touch device addresses at all, and the fault ends the context.) README.md lists what
 * is refused and how to configure it.
 */
#include "cuda_call.h"
#include "cuda_devices.h"
#include "cuda_memory.h"

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
