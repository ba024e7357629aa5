/* A stand-in for libnvidia-ml.so.1: lists the machine's devices and says how much memory they use.
 *
 * A handle is a device's place in machine.h's list plus one. NVML counts GPUs in its own order and
 * knows MIG instances only by their GPU.
 */
#include "machine.h"

typedef int nvmlReturn_t;
typedef intptr_t nvmlDevice_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;

typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } nvmlProcessInfo_t;

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9
};

static struct device all[DEVICES_MAX];
static int count, users;

#define REFUSE_IF(wrong, code) do { if (wrong) return code; } while (0)
#define DEVICE(handle) \
    REFUSE_IF(!users, UNINITIALIZED); \
    REFUSE_IF(handle < 1 || handle > count, INVALID_ARGUMENT); \
    struct device *device = &all[handle - 1]

nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    REFUSE_IF(number("STANDIN_NVML_INIT", 0), (int)number("STANDIN_NVML_INIT", 0));
    if (!users++) count = machine_devices(all);
    return SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void) {
    REFUSE_IF(!users, UNINITIALIZED);
    users--;
    return SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t code) {
    return code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : code ? "Some Error" : "Success";
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    REFUSE_IF(!users, UNINITIALIZED);
    snprintf(version, length, "580.00");
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *out) {
    REFUSE_IF(!users, UNINITIALIZED);
    *out = 0;
    for (int i = 0; i < count; i++) *out += all[i].parent < 0;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *out) {
    REFUSE_IF(!users, UNINITIALIZED);
    for (int i = 0; i < count; i++)
        if (all[i].parent < 0 && !index--) return *out = i + 1, SUCCESS;
    return INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out) {
    REFUSE_IF(!users, UNINITIALIZED);
    for (int i = 0; i < count; i++)
        if (!strcmp(all[i].uuid, uuid)) return *out = i + 1, SUCCESS;
    return NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t handle, char *uuid, unsigned length) {
    DEVICE(handle);
    snprintf(uuid, length, "%s", device->uuid);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t handle, char *name, unsigned length) {
    DEVICE(handle);
    snprintf(name, length, "Stand-in%s", device->parent < 0 ? "" : " MIG");
    return SUCCESS;
}

/* GPUs that know no MIG say so with an error: here, those of a machine without any instance. */
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t handle, unsigned *now, unsigned *pending) {
    DEVICE(handle);
    bool knows_mig = false;
    for (int i = 0; i < count; i++) knows_mig |= all[i].instances > 0;
    REFUSE_IF(!knows_mig, NOT_SUPPORTED);
    *now = *pending = device->instances > 0;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t handle, unsigned *out) {
    DEVICE(handle);
    *out = device->instances ? 7 : 0;
    return SUCCESS;
}

/* Places that hold no instance are not found: here the even ones, so that nobody stops at the first. */
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t handle, unsigned at, nvmlDevice_t *out) {
    DEVICE(handle);
    REFUSE_IF(at >= 7, INVALID_ARGUMENT);
    REFUSE_IF(at % 2 == 0 || (int)at / 2 >= device->instances, NOT_FOUND);
    *out = handle + 1 + at / 2;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t handle, nvmlMemory_t *out) {
    DEVICE(handle);
    unsigned long long total = machine_memory(), used = machine_used(device->uuid);
    *out = (nvmlMemory_t){.total = total, .used = used, .free = total > used ? total - used : 0};
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t handle, nvmlMemory_v2_t *out) {
    nvmlMemory_t plain;
    nvmlReturn_t wrong = nvmlDeviceGetMemoryInfo(handle, &plain);
    REFUSE_IF(wrong, wrong);
    out->total = plain.total, out->free = plain.free, out->used = plain.used, out->reserved = 0;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t handle, unsigned *out) {
    DEVICE(handle);
    (void)device;
    *out = (unsigned)number("STANDIN_PERSISTENCE", 1);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t handle, unsigned *out) {
    DEVICE(handle);
    (void)device;
    *out = (unsigned)number("STANDIN_COMPUTE_MODE", 0);
    return SUCCESS;
}

/* Whoever holds memory of the device; the first call asks how many there are. */
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(
    nvmlDevice_t handle, unsigned *room, nvmlProcessInfo_t *out) {
    DEVICE(handle);
    DIR *processes = opendir("/proc");
    struct dirent *entry;
    unsigned found = 0;
    while (processes && (entry = readdir(processes))) {
        if (!isdigit(entry->d_name[0])) continue;
        uint64_t bytes = machine_used_by(device->uuid, entry->d_name);
        if (!bytes) continue;
        if (out && found < *room)
            out[found] = (nvmlProcessInfo_t){.pid = (unsigned)atoi(entry->d_name), .used = bytes};
        found++;
    }
    if (processes) closedir(processes);
    bool is_short = found > (out ? *room : 0);
    *room = found;
    return is_short ? INSUFFICIENT_SIZE : SUCCESS;
}
