/* Delays system calls by which others see what this process does: preloaded into every process of
   a test run. Between one such call and the next a process is as slow as if it waited for a CPU
   exactly there, so that two facts that become known "at once" do so one by one.

   STUTTER_PERCENT of the calls wait, half of them before and half after the call; most for less
   than a tenth of STUTTER_MOST_MS. STUTTER_WHO: `servers`, `tests` (pytest and its workers) or `any`. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double percent, most_ms; /* percent 0: this process is left alone */
static __thread uint64_t state;

static double draw(void) { /* from 0 to 1: xorshift64* */
  if (!state) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    state = ((uint64_t)now.tv_nsec << 20) ^ (uint64_t)getpid() ^ (uint64_t)(uintptr_t)&state;
  }
  state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
  return (double)((state * 2685821657736338717u) >> 11) / 9007199254740992.0;
}

static void wait_now(double share) {
  if (!percent || draw() * 100 > percent * share) return;
  int kept = errno;
  double luck = draw(), ms = most_ms * luck * luck * luck;
  struct timespec left = {0, (long)(ms * 1e6)};
  nanosleep(&left, NULL); /* a signal ends it early */
  errno = kept;
}

__attribute__((constructor)) static void begin(void) {
  const char *wanted = getenv("STUTTER_PERCENT"), *most = getenv("STUTTER_MOST_MS"), *who = getenv("STUTTER_WHO");
  if (!wanted || !most || !who) return;
  char words[4096] = {0};
  int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  ssize_t got = fd < 0 ? 0 : read(fd, words, sizeof words - 1);
  if (fd >= 0) close(fd);
  for (ssize_t at = 0; at < got - 1; at++)
    if (!words[at]) words[at] = ' ';
  int is_test = strstr(words, " pytest ") || strstr(words, "import sys;exec(eval(");
  if (strcmp(who, is_test ? "servers" : "tests") == 0) return;
  most_ms = atof(most) < 999 ? atof(most) : 999;
  percent = atof(wanted);
}

/* It has done all its work, and its descriptors are still open. */
__attribute__((destructor)) static void end(void) { wait_now(4); }

#define REAL(name) \
  static __typeof__(name) *real; \
  if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define AROUND(share, type, name, parameters, arguments) \
  type name parameters { \
    REAL(name); \
    wait_now(share / 2); \
    type result = real arguments; \
    wait_now(share / 2); \
    return result; \
  }

/* What waits itself is only late when it returns. */
#define AFTER(share, type, name, parameters, arguments) \
  type name parameters { \
    REAL(name); \
    type result = real arguments; \
    if (result > 0) wait_now(share); \
    return result; \
  }

AROUND(1.0, ssize_t, send, (int fd, const void *data, size_t length, int flags), (fd, data, length, flags))
AROUND(1.0, ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags), (fd, message, flags))
AROUND(1.0, ssize_t, write, (int fd, const void *data, size_t length), (fd, data, length))
AROUND(1.0, ssize_t, writev, (int fd, const struct iovec *parts, int count), (fd, parts, count))
AROUND(1.0, ssize_t, pwrite64, (int fd, const void *data, size_t length, off64_t at), (fd, data, length, at))
AROUND(1.0, int, connect, (int fd, const struct sockaddr *address, socklen_t length), (fd, address, length))
AROUND(1.0, int, accept4, (int fd, struct sockaddr *address, socklen_t *length, int flags), (fd, address, length, flags))
AROUND(1.0, int, bind, (int fd, const struct sockaddr *address, socklen_t length), (fd, address, length))
AROUND(1.0, int, listen, (int fd, int backlog), (fd, backlog))
AROUND(1.0, int, shutdown, (int fd, int how), (fd, how))
AROUND(0.3, int, close, (int fd), (fd))
AROUND(1.0, int, unlink, (const char *path), (path))
AROUND(1.0, int, rename, (const char *from, const char *to), (from, to))
AROUND(1.0, int, mkdir, (const char *path, mode_t mode), (path, mode))
AROUND(1.0, int, flock, (int fd, int operation), (fd, operation))
AROUND(1.0, int, fsync, (int fd), (fd))
AROUND(1.0, int, kill, (pid_t pid, int number), (pid, number))
AROUND(1.0, int, execve, (const char *path, char *const arguments[], char *const environment[]), (path, arguments, environment))
AROUND(1.0, pid_t, waitpid, (pid_t pid, int *status, int options), (pid, status, options))
AROUND(1.0, pid_t, wait4, (pid_t pid, int *status, int options, struct rusage *usage), (pid, status, options, usage))
AROUND(1.0, int, waitid, (idtype_t type, id_t id, siginfo_t *info, int options), (type, id, info, options))
AFTER(0.5, int, epoll_wait, (int fd, struct epoll_event *events, int count, int ms), (fd, events, count, ms))
AFTER(0.5, int, epoll_pwait, (int fd, struct epoll_event *events, int count, int ms, const sigset_t *mask), (fd, events, count, ms, mask))
AFTER(0.5, int, poll, (struct pollfd *fds, nfds_t count, int ms), (fds, count, ms))
AFTER(0.5, ssize_t, recv, (int fd, void *data, size_t length, int flags), (fd, data, length, flags))
AFTER(0.5, ssize_t, recvmsg, (int fd, struct msghdr *message, int flags), (fd, message, flags))

void _exit(int status) {
  static void (*real)(int);
  if (!real) real = (void (*)(int))dlsym(RTLD_NEXT, "_exit");
  wait_now(4);
  real(status);
  __builtin_unreachable();
}
