/* Physical memory, addresses, and one mapped at the other with rights. */

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
    bool is_limited = getenv("STANDIN_MEMORY");
    REFUSE_IF(is_limited && machine_used(uuid) + size > machine_memory(), OUT_OF_MEMORY);
    char name[2 * NAME_MAX_BYTES];
    snprintf(name, sizeof name, "standin:%s:%s:%zu", machine_name(), uuid, size);
    int fd = memfd_create(name, MFD_CLOEXEC);
    REFUSE_IF(fd < 0, OPERATING_SYSTEM);
    if (ftruncate(fd, size) || machine_lock(fd, uuid, size)) {
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
    REFUSE_IF(!b || flags || offset || !is_whole(size) || size > b->size, INVALID_VALUE);
    /* NVIDIA does not document whether less than all can be mapped: both are driven by tests. */
    REFUSE_IF(size < b->size && !number("STANDIN_PARTIAL_MAPS", 0), INVALID_VALUE);
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
