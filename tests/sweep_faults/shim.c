/* Makes one system call of one process of a pod fail: preloaded into every process of the pod.

   Wraps the functions of libc that make a descriptor, a process, a thread or a file, and obeys a
   control block in a file that all processes map (shim.py has the other side). The block records
   the calls, or arms one fault: in which process, which kind of call, at which site, and the error.

   A *site* is the call and the Python stack that led to it, innermost first, up to where only the
   interpreter's own modules follow: `socket@socket.py:__init__:232<plumbing/wire/…`. A call from
   outside Python has the site `socket@native`.

   The shim itself keeps no descriptor open, because the pod counts its own. Python spawns with
   vfork; here that is fork, so that a wrapper never runs in a stack frame that two processes share.
   dup2 and dup3 are not wrapped: they replace a descriptor, and do not fail for lack of one. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif
#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

enum { OFF, RECORD, ARMED };
enum { FD = 1, PROCESS = 2, THREAD = 4, NEW_FILE = 8 };

/* shim.py has the same layout. */
struct control {
  uint32_t state;
  uint32_t kinds;   /* of the armed fault */
  int32_t error;    /* the errno */
  uint32_t seen;    /* matching calls */
  uint32_t fired;   /* calls that failed: one at most */
  uint32_t armings; /* how often a fault was armed, or recording began */
  char process[256]; /* parts of the command line, by line; with `!` in front, not a part of it */
  char site[1024];   /* a part of the site; empty: any */
  char root[256];    /* paths below it are shown from there */
  char log[256];     /* where records go */
};

static struct control *control;
static char identity[512]; /* the engine and the command line */

#define SITE_BYTES 1024
#define STACK_BYTES 16384
static __thread char *stack; /* of this thread, while it is captured */
static __thread size_t stack_length;
static __thread int is_inside;

#define REAL(name) \
  static __typeof__(name) *real; \
  if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static ssize_t raw_write(int fd, const void *data, size_t length) {
  return syscall(SYS_write, fd, data, length);
}

static uint64_t now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static void append(const char *line, size_t length) {
  int fd = (int)syscall(SYS_openat, AT_FDCWD, control->log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return;
  raw_write(fd, line, length);
  syscall(SYS_close, fd);
}

static void log_record(char what, unsigned kinds, const char *site) {
  char line[SITE_BYTES + sizeof identity + 64];
  int length = snprintf(line, sizeof line, "%c\t%d\t%u\t%llu\t%s\t%s\n", what, getpid(), kinds,
                        (unsigned long long)now_ms(), identity, site);
  append(line, length < (int)sizeof line ? (size_t)length : sizeof line - 1);
}

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("SWEEP_FAULTS"), *engine = getenv("ENGINE_ID");
  if (!path) return;
  int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) return;
  void *mapped = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  syscall(SYS_close, fd);
  if (mapped == MAP_FAILED) return;
  int used = snprintf(identity, sizeof identity, "%s ", engine ? engine : "-");
  fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY | O_CLOEXEC, 0);
  if (fd >= 0) {
    ssize_t got = syscall(SYS_read, fd, identity + used, sizeof identity - 1 - (size_t)used);
    syscall(SYS_close, fd);
    for (ssize_t at = used; at < used + got; at++)
      if ((unsigned char)identity[at] < ' ') identity[at] = ' ';
    if (got >= 0) identity[used + got] = 0;
  }
  __atomic_store_n(&control, mapped, __ATOMIC_RELEASE);
}

/* ------------------------------------------------------------------ the site of a call */

/* The name of a source file: from the root, or its last component. */
static const char *short_name(const char *file) {
  size_t root = strlen(control->root);
  if (root && strncmp(file, control->root, root) == 0 && !strstr(file, "/site-packages/"))
    return file + root;
  const char *last = strrchr(file, '/');
  return last ? last + 1 : file;
}

static int is_ours(const char *file) {
  size_t root = strlen(control->root);
  return root && strncmp(file, control->root, root) == 0 && !strstr(file, "/.venv");
}

/* Append the frames of `stack` to `site`. An import is one frame, whatever it imports in turn. */
static void add_frames(char *site, size_t used) {
  char *line = stack, *import_end = NULL;
  for (char *at = stack; (at = strstr(at, "\"<frozen importlib")); at++) import_end = at;
  if (import_end) {
    used += (size_t)snprintf(site + used, SITE_BYTES - used, "import<");
    line = strchr(import_end, '\n');
  }
  int was_ours = 0;
  for (; line && used < SITE_BYTES - 1; line = strchr(line, '\n')) {
    char file[512], function[128];
    unsigned number;
    line += *line == '\n';
    if (sscanf(line, "  File \"%511[^\"]\", line %u in %127s", file, &number, function) != 3) continue;
    if (!is_ours(file) && was_ours) continue;
    was_ours |= is_ours(file);
    used += (size_t)snprintf(site + used, SITE_BYTES - used, "%s:%s:%u<", short_name(file), function, number);
  }
  if (used > SITE_BYTES - 1) used = SITE_BYTES - 1;
  if (used && site[used - 1] == '<') site[used - 1] = 0;
}

static void find_site(const char *call, char *site) {
  static int (*is_initialized)(void);
  static void *(*this_thread)(void);
  static void (*dump)(int, void *);
  if (!dump) {
    is_initialized = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    this_thread = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
    dump = (void (*)(int, void *))dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
  }
  size_t used = (size_t)snprintf(site, SITE_BYTES, "%s@", call);
  void *thread = is_initialized && this_thread && dump && is_initialized() ? this_thread() : NULL;
  char buffer[STACK_BYTES];
  if (thread) {
    stack = buffer; /* `write` puts into it what `dump` writes */
    stack_length = 0;
    dump(2, thread);
    buffer[stack_length] = 0;
    add_frames(site, used);
    stack = NULL;
  }
  if (!site[used]) snprintf(site + used, SITE_BYTES - used, "native");
}

/* ------------------------------------------------------------------ recording and failing */

static int is_meant(void) {
  char wanted[sizeof control->process], *rest = wanted, *part;
  memcpy(wanted, control->process, sizeof wanted);
  while ((part = strsep(&rest, "\n")))
    if (part[0] == '!' ? strstr(identity, part + 1) != NULL : strstr(identity, part) == NULL) return 0;
  return 1;
}

/* Whether this process has recorded `site` since recording began. */
static int is_known(const char *site) {
  static uint64_t known[8192];
  uint64_t hash = 1469598103934665603u + __atomic_load_n(&control->armings, __ATOMIC_RELAXED);
  for (const char *at = site; *at; at++) hash = (hash ^ (unsigned char)*at) * 1099511628211u;
  hash |= 1;
  for (size_t tries = 0; tries < 64; tries++) {
    uint64_t *place = &known[(hash + tries) % 8192], empty = 0;
    if (__atomic_load_n(place, __ATOMIC_RELAXED) == hash) return 1;
    if (__atomic_compare_exchange_n(place, &empty, hash, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return 0;
  }
  return 0;
}

static int fails_here(unsigned kinds, const char *site) {
  if (control->site[0] && !strstr(site, control->site)) return 0;
  if (__atomic_fetch_add(&control->seen, 1, __ATOMIC_SEQ_CST)) return 0;
  /* The log line first: who sees `fired` may read it. */
  log_record('F', kinds, site);
  __atomic_fetch_add(&control->fired, 1, __ATOMIC_SEQ_CST);
  return 1;
}

/* Note the call; true: it must fail, and errno is set. */
static int fails(const char *call, unsigned kinds) {
  if (!control || is_inside || control->state == OFF) return 0;
  if (control->state == ARMED && !(control->kinds & kinds)) return 0;
  if (control->state == ARMED && !is_meant()) return 0;
  int kept = errno, failed = 0;
  char site[SITE_BYTES];
  is_inside = 1;
  find_site(call, site);
  if (control->state == ARMED)
    failed = fails_here(kinds, site);
  else if (!is_known(site))
    log_record('R', kinds, site);
  is_inside = 0;
  errno = failed ? control->error : kept;
  return failed;
}

/* ------------------------------------------------------------------ descriptors */

int socket(int domain, int type, int protocol) {
  REAL(socket);
  return fails("socket", FD) ? -1 : real(domain, type, protocol);
}

int socketpair(int domain, int type, int protocol, int both[2]) {
  REAL(socketpair);
  return fails("socketpair", FD) ? -1 : real(domain, type, protocol, both);
}

int accept(int fd, struct sockaddr *address, socklen_t *length) {
  REAL(accept);
  return fails("accept", FD) ? -1 : real(fd, address, length);
}

int accept4(int fd, struct sockaddr *address, socklen_t *length, int flags) {
  REAL(accept4);
  return fails("accept", FD) ? -1 : real(fd, address, length, flags);
}

int dup(int fd) {
  REAL(dup);
  return fails("dup", FD) ? -1 : real(fd);
}

#define FCNTL(name) \
  int name(int fd, int command, ...) { \
    REAL(name); \
    va_list rest; \
    va_start(rest, command); \
    void *argument = va_arg(rest, void *); \
    va_end(rest); \
    int is_dup = command == F_DUPFD || command == F_DUPFD_CLOEXEC; \
    return is_dup && fails("dup", FD) ? -1 : real(fd, command, argument); \
  }
FCNTL(fcntl)
FCNTL(fcntl64)

int pipe(int both[2]) {
  REAL(pipe);
  return fails("pipe", FD) ? -1 : real(both);
}

int pipe2(int both[2], int flags) {
  REAL(pipe2);
  return fails("pipe", FD) ? -1 : real(both, flags);
}

int memfd_create(const char *name, unsigned flags) {
  REAL(memfd_create);
  return fails("memfd_create", FD) ? -1 : real(name, flags);
}

int eventfd(unsigned value, int flags) {
  REAL(eventfd);
  return fails("eventfd", FD) ? -1 : real(value, flags);
}

int timerfd_create(int clock, int flags) {
  REAL(timerfd_create);
  return fails("timerfd_create", FD) ? -1 : real(clock, flags);
}

int epoll_create(int size) {
  REAL(epoll_create);
  return fails("epoll_create", FD) ? -1 : real(size);
}

int epoll_create1(int flags) {
  REAL(epoll_create1);
  return fails("epoll_create", FD) ? -1 : real(flags);
}

int inotify_init1(int flags) {
  REAL(inotify_init1);
  return fails("inotify_init", FD) ? -1 : real(flags);
}

int pidfd_open(pid_t pid, unsigned flags) {
  return fails("pidfd_open", FD) ? -1 : (int)syscall(SYS_pidfd_open, pid, flags);
}

/* Linux 6.5's way to ask for a descriptor. */
int getsockopt(int fd, int level, int option, void *value, socklen_t *length) {
  REAL(getsockopt);
  int is_pidfd = level == SOL_SOCKET && option == SO_PEERPIDFD;
  return is_pidfd && fails("SO_PEERPIDFD", FD) ? -1 : real(fd, level, option, value, length);
}

/* The kernel drops the descriptors that do not fit, and says so; the bytes arrive. */
ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
  REAL(recvmsg);
  ssize_t got = real(fd, message, flags);
  struct cmsghdr *first = got >= 0 ? CMSG_FIRSTHDR(message) : NULL;
  if (!first || first->cmsg_level != SOL_SOCKET || first->cmsg_type != SCM_RIGHTS) return got;
  if (!fails("recvmsg", FD)) return got;
  size_t count = (first->cmsg_len - CMSG_LEN(0)) / sizeof(int);
  for (size_t at = 0; at < count; at++) {
    int received;
    memcpy(&received, CMSG_DATA(first) + at * sizeof(int), sizeof received);
    close(received);
  }
  message->msg_controllen = 0;
  message->msg_flags |= MSG_CTRUNC;
  return got;
}

/* What Python and libuv call by number. */
long syscall(long number, ...) {
  static long (*real)(long, ...);
  if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  va_list rest;
  va_start(rest, number);
  long a = va_arg(rest, long), b = va_arg(rest, long), c = va_arg(rest, long);
  long d = va_arg(rest, long), e = va_arg(rest, long), f = va_arg(rest, long);
  va_end(rest);
  if (control && !is_inside) {
    if (number == SYS_pidfd_open && fails("pidfd_open", FD)) return -1;
    if (number == SYS_pidfd_getfd && fails("pidfd_getfd", FD)) return -1;
    if (number == SYS_memfd_create && fails("memfd_create", FD)) return -1;
  }
  return real(number, a, b, c, d, e, f);
}

/* ------------------------------------------------------------------ files, and opening them */

static int may_make(int flags) { return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE; }

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    REAL(name); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = may_make(flags) ? va_arg(rest, mode_t) : 0; \
    va_end(rest); \
    if (fails("open", FD | (may_make(flags) ? NEW_FILE : 0))) return -1; \
    return real(path, flags, mode); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
  int name(int base, const char *path, int flags, ...) { \
    REAL(name); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = may_make(flags) ? va_arg(rest, mode_t) : 0; \
    va_end(rest); \
    if (fails("open", FD | (may_make(flags) ? NEW_FILE : 0))) return -1; \
    return real(base, path, flags, mode); \
  }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name) \
  FILE *name(const char *path, const char *mode) { \
    REAL(name); \
    return fails("open", FD | (mode[0] == 'r' ? 0 : NEW_FILE)) ? NULL : real(path, mode); \
  }
FOPEN(fopen)
FOPEN(fopen64)

DIR *opendir(const char *path) {
  REAL(opendir);
  return fails("opendir", FD) ? NULL : real(path);
}

int shm_open(const char *name, int flags, mode_t mode) {
  REAL(shm_open);
  return fails("shm_open", FD | (may_make(flags) ? NEW_FILE : 0)) ? -1 : real(name, flags, mode);
}

int mkdir(const char *path, mode_t mode) {
  REAL(mkdir);
  return fails("mkdir", NEW_FILE) ? -1 : real(path, mode);
}

int rename(const char *from, const char *to) {
  REAL(rename);
  return fails("rename", NEW_FILE) ? -1 : real(from, to);
}

int link(const char *from, const char *to) {
  REAL(link);
  return fails("link", NEW_FILE) ? -1 : real(from, to);
}

int linkat(int from_base, const char *from, int to_base, const char *to, int flags) {
  REAL(linkat);
  return fails("link", NEW_FILE) ? -1 : real(from_base, from, to_base, to, flags);
}

int symlink(const char *from, const char *to) {
  REAL(symlink);
  return fails("symlink", NEW_FILE) ? -1 : real(from, to);
}

/* A Unix socket is bound to a new file. */
int bind(int fd, const struct sockaddr *address, socklen_t length) {
  REAL(bind);
  int is_file = address && address->sa_family == AF_UNIX;
  return is_file && fails("bind", NEW_FILE) ? -1 : real(fd, address, length);
}

#define SIZED(name) \
  int name(int fd, off64_t size) { \
    REAL(name); \
    return fails("ftruncate", NEW_FILE) ? -1 : real(fd, size); \
  }
SIZED(ftruncate)
SIZED(ftruncate64)

#define FALLOCATE(name) \
  int name(int fd, off64_t offset, off64_t size) { \
    REAL(name); \
    return fails("fallocate", NEW_FILE) ? errno : real(fd, offset, size); \
  }
FALLOCATE(posix_fallocate)
FALLOCATE(posix_fallocate64)

/* Whether a write to `fd` may need space on a disk; asked only while that matters. */
static int is_file(int fd) {
  struct stat found;
  if (!control || is_inside || control->state == OFF) return 0;
  if (control->state == ARMED && !(control->kinds & NEW_FILE)) return 0;
  int kept = errno, is_regular = fstat(fd, &found) == 0 && S_ISREG(found.st_mode);
  errno = kept;
  return is_regular;
}

ssize_t write(int fd, const void *data, size_t length) {
  if (stack) {
    size_t room = STACK_BYTES - 1 - stack_length, part = length < room ? length : room;
    memcpy(stack + stack_length, data, part);
    stack_length += part;
    return (ssize_t)length;
  }
  REAL(write);
  return is_file(fd) && fails("write", NEW_FILE) ? -1 : real(fd, data, length);
}

#define PWRITE(name) \
  ssize_t name(int fd, const void *data, size_t length, off64_t offset) { \
    REAL(name); \
    return is_file(fd) && fails("pwrite", NEW_FILE) ? -1 : real(fd, data, length, offset); \
  }
PWRITE(pwrite)
PWRITE(pwrite64)

int fsync(int fd) {
  REAL(fsync);
  return is_file(fd) && fails("fsync", NEW_FILE) ? -1 : real(fd);
}

int fdatasync(int fd) {
  REAL(fdatasync);
  return is_file(fd) && fails("fdatasync", NEW_FILE) ? -1 : real(fd);
}

/* ------------------------------------------------------------------ processes and threads */

static __thread int has_failed_once;

pid_t fork(void) {
  REAL(fork);
  if (has_failed_once) { /* Python tries fork where vfork fails; a full machine refuses both */
    has_failed_once = 0;
    errno = control->error;
    return -1;
  }
  return fails("fork", PROCESS) ? -1 : real();
}

pid_t vfork(void) {
  has_failed_once = fails("vfork", PROCESS);
  if (has_failed_once) return -1;
  static pid_t (*real)(void);
  if (!real) real = (pid_t (*)(void))dlsym(RTLD_NEXT, "fork");
  return real();
}

#define SPAWN(name) \
  int name(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions, \
           const posix_spawnattr_t *attributes, char *const arguments[], char *const environment[]) { \
    REAL(name); \
    if (fails("posix_spawn", PROCESS)) return errno; \
    return real(pid, path, actions, attributes, arguments, environment); \
  }
SPAWN(posix_spawn)
SPAWN(posix_spawnp)

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
  REAL(pthread_create);
  return fails("pthread_create", THREAD) ? errno : real(thread, attributes, run, argument);
}
