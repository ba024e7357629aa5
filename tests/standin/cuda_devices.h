/* Devices, which of them a process sees, and their primary contexts. */

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
