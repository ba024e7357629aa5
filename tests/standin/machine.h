/* The machine that both stand-ins pretend to be: its devices, and the memory that is in use on them.
 *
 * Everything comes from the environment (see README.md beside this file). Physical memory is memfds,
 * recognised by their name "standin:MACHINE:DEVICE:SIZE"; what is in use is whatever descriptor or
 * mapping of such a file exists, so a process that is killed frees as on the real thing. The kernel
 * counts them: each file is locked from birth, and its lock ends with the last of them. So the cost
 * of a look does not depend on how many processes the computer has.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEVICES_MAX 32
#define NAME_MAX_BYTES 128
#define FILES_MAX 16384

/* Two plain GPUs. CUDA counts them the other way round, so that confusing the orders always shows. */
#define DEFAULT_DEVICES \
    "GPU-5a0f1b2c-0000-4000-8000-00000000000a,GPU-5a0f1b2c-1111-4111-8111-11111111111b"
#define DEFAULT_MEMORY (80ULL << 30)
#define DEFAULT_GRANULARITY (2ULL << 20)

struct device {
    char uuid[NAME_MAX_BYTES]; /* GPU-… or MIG-… */
    int parent;                /* of a MIG instance: the index of its GPU; else -1 */
    int instances;             /* of a GPU in MIG mode: how many; they follow it directly */
};

static inline const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

static inline uint64_t number(const char *name, uint64_t otherwise) {
    const char *value = getenv(name);
    return value && *value ? strtoull(value, NULL, 0) : otherwise;
}

static inline const char *machine_name(void) { return setting("STANDIN_MACHINE", "machine"); }
static inline uint64_t machine_memory(void) { return number("STANDIN_MEMORY", DEFAULT_MEMORY); }
static inline uint64_t machine_granularity(void) {
    return number("STANDIN_GRANULARITY", DEFAULT_GRANULARITY);
}

/* STANDIN_DEVICES, in NVML's order: "GPU-a,GPU-b=MIG-c+MIG-d"; returns how many there are. */
static inline int machine_devices(struct device out[DEVICES_MAX]) {
    char text[4096], *at = text, *gpu;
    int count = 0;
    snprintf(text, sizeof text, "%s", setting("STANDIN_DEVICES", DEFAULT_DEVICES));
    while ((gpu = strsep(&at, ",")) && count < DEVICES_MAX) {
        char *instances = gpu, *name = strsep(&instances, "="), *mig;
        int parent = count++;
        out[parent] = (struct device){.parent = -1};
        snprintf(out[parent].uuid, NAME_MAX_BYTES, "%s", name);
        while (instances && (mig = strsep(&instances, "+")) && count < DEVICES_MAX) {
            out[count] = (struct device){.parent = parent};
            snprintf(out[count++].uuid, NAME_MAX_BYTES, "%s", mig);
            out[parent].instances++;
        }
    }
    return count;
}

/* -- how much of a device's memory one process holds, and all of them */

struct usage {
    char wanted[2 * NAME_MAX_BYTES];
    uint64_t bytes;
    ino_t seen[FILES_MAX];
    int files;
};

/* Add the file called `name` ("/memfd:standin:MACHINE:DEVICE:SIZE (deleted)") unless it was seen. */
static inline void usage_add(struct usage *usage, const char *name, ino_t inode) {
    size_t length = strlen(usage->wanted);
    if (strncmp(name, usage->wanted, length)) return;
    for (int i = 0; i < usage->files; i++)
        if (usage->seen[i] == inode) return;
    if (usage->files == FILES_MAX) abort();
    usage->seen[usage->files++] = inode;
    usage->bytes += strtoull(name + length, NULL, 10);
}

static inline void usage_of_process(struct usage *usage, const char *pid) {
    char path[600], target[2 * NAME_MAX_BYTES], line[1024];
    struct dirent *entry;
    snprintf(path, sizeof path, "/proc/%s/fd", pid);
    DIR *fds = opendir(path);
    while (fds && (entry = readdir(fds))) {
        struct stat found;
        snprintf(path, sizeof path, "/proc/%s/fd/%s", pid, entry->d_name);
        ssize_t length = readlink(path, target, sizeof target - 1);
        if (length <= 0) continue;
        target[length] = 0;
        if (!strncmp(target, "/memfd:standin:", 15) && !stat(path, &found))
            usage_add(usage, target, found.st_ino);
    }
    if (fds) closedir(fds);
    snprintf(path, sizeof path, "/proc/%s/maps", pid);
    FILE *maps = fopen(path, "re");
    while (maps && fgets(line, sizeof line, maps)) {
        char *name = strstr(line, "/memfd:standin:");
        unsigned long inode;
        if (name && sscanf(line, "%*s %*s %*s %*s %lu", &inode) == 1) usage_add(usage, name, inode);
    }
    if (maps) fclose(maps);
}

static inline uint64_t machine_used_by(const char *uuid, const char *pid) {
    struct usage *usage = calloc(1, sizeof *usage);
    snprintf(usage->wanted, sizeof usage->wanted, "/memfd:standin:%s:%s:", machine_name(), uuid);
    usage_of_process(usage, pid);
    uint64_t bytes = usage->bytes;
    free(usage);
    return bytes;
}

/* A lock on memory says whose it is and how much: it begins at a number of the device's own, and is
 * as long as the memory. (FNV-1a, and room behind it for any size.) */
static inline uint64_t lock_start(const char *uuid) {
    char name[2 * NAME_MAX_BYTES];
    uint64_t hash = 14695981039346656037ULL;
    snprintf(name, sizeof name, "%s:%s", machine_name(), uuid);
    for (char *at = name; *at; at++) hash = (hash ^ (unsigned char)*at) * 1099511628211ULL;
    return hash >> 3;
}

/* Lock new memory: the lock belongs to the open file, which descriptors and mappings share. */
static inline int machine_lock(int fd, const char *uuid, uint64_t size) {
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET};
    lock.l_start = (off_t)lock_start(uuid), lock.l_len = (off_t)size;
    return fcntl(fd, F_OFD_SETLK, &lock);
}

static inline uint64_t locked_now(uint64_t wanted) {
    char line[256];
    uint64_t start, end, bytes = 0;
    FILE *locks = fopen("/proc/locks", "re");
    while (locks && fgets(line, sizeof line, locks))
        if (sscanf(line, "%*s OFDLCK %*s %*s %*s %*s %lu %lu", &start, &end) == 2 && start == wanted)
            bytes += end - start + 1;
    if (locks) fclose(locks);
    return bytes;
}

/* The kernel hands the list out in pieces, between which it may change: two looks must agree. */
static inline uint64_t machine_used(const char *uuid) {
    uint64_t wanted = lock_start(uuid), before, bytes = locked_now(wanted);
    do before = bytes, bytes = locked_now(wanted);
    while (bytes != before);
    return bytes;
}
