/* To be preloaded: what a process meets on a kernel, or a file system, that lacks what we need. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/file.h>
#include <sys/socket.h>

#define SO_PEERPIDFD 77

int getsockopt(int fd, int level, int name, void *value, socklen_t *length) {
    if (level == SOL_SOCKET && name == SO_PEERPIDFD) {
        errno = ENOPROTOOPT; /* Linux before 6.5 */
        return -1;
    }
    int (*real)(int, int, int, void *, socklen_t *) = dlsym(RTLD_NEXT, "getsockopt");
    return real(fd, level, name, value, length);
}

int flock(int fd, int operation) {
    (void)fd, (void)operation;
    errno = ENOLCK; /* NFS without a lock daemon */
    return -1;
}
