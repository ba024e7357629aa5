/* The least that any process does between the stub and a client: read, write, and epoll for both.

       copier SOCKET PORT | copier SOCKET PATH

   What it takes for an event is the kernel's. On a PATH clients come over a Unix socket: the
   difference is what TCP takes, where over loopback a write does the receiver's half of it, too. */

#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { BACKLOG = 4096, EVENTS_AT_ONCE = 1024, BUFFER_BYTES = 256 * 1024 }; /* as libuv has them */

static int poller;
static int *peer_of; /* by descriptor; -1: none yet */
static struct sockaddr_un engine = {.sun_family = AF_UNIX};

static int check(int result, const char *what) {
    if (result < 0) {
        perror(what);
        exit(1);
    }
    return result;
}

static void watch(int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    check(epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
}

static int listen_at(const char *where) {
    int fd, one = 1;
    if (where[0] == '/') {
        struct sockaddr_un path = {.sun_family = AF_UNIX};
        strncpy(path.sun_path, where, sizeof path.sun_path - 1);
        fd = check(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0), "socket");
        check(bind(fd, (struct sockaddr *)&path, sizeof path), "bind");
    } else {
        struct sockaddr_in port = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(where))};
        port.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        fd = check(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), "socket");
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        check(bind(fd, (struct sockaddr *)&port, sizeof port), "bind");
    }
    check(listen(fd, BACKLOG), "listen");
    return fd;
}

static void accept_all(int door) {
    int fd, one = 1;
    while ((fd = accept4(door, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one); /* no effect on a PATH */
        peer_of[fd] = -1;
        watch(fd);
    }
}

static int connect_engine(int client) {
    int fd = check(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0), "socket");
    check(connect(fd, (struct sockaddr *)&engine, sizeof engine), "connect");
    peer_of[fd] = client;
    peer_of[client] = fd;
    watch(fd);
    return fd;
}

static void send_all(int fd, const char *data, size_t left) {
    while (left > 0) {
        ssize_t sent = write(fd, data, left);
        if (sent < 0 && errno == EAGAIN) { /* the bench's clients always read on */
            struct pollfd room = {.fd = fd, .events = POLLOUT};
            poll(&room, 1, -1);
        } else if (sent < 0) {
            return; /* it has closed, as reading will tell */
        } else {
            data += sent, left -= (size_t)sent;
        }
    }
}

static void pass_on(int fd) {
    static char buffer[BUFFER_BYTES];
    if (peer_of[fd] == -2)
        return; /* closed in this turn */
    ssize_t size = read(fd, buffer, sizeof buffer);
    if (size < 0 && errno == EAGAIN)
        return;
    int peer = peer_of[fd];
    if (size > 0) {
        send_all(peer < 0 ? connect_engine(fd) : peer, buffer, (size_t)size);
        return;
    }
    peer_of[fd] = -2;
    close(fd);
    if (peer >= 0) {
        peer_of[peer] = -2;
        close(peer);
    }
}

int main(int argc, char **argv) {
    struct rlimit limit;
    struct epoll_event events[EVENTS_AT_ONCE];
    if (argc != 3)
        return 2;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGPIPE, SIG_IGN);
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    peer_of = calloc(limit.rlim_cur, sizeof *peer_of);
    strncpy(engine.sun_path, argv[1], sizeof engine.sun_path - 1);
    poller = check(epoll_create1(0), "epoll_create1");
    int door = listen_at(argv[2]);
    watch(door);
    for (;;) {
        int count = check(epoll_wait(poller, events, EVENTS_AT_ONCE, -1), "epoll_wait");
        for (int at = 0; at < count; at++) {
            if (events[at].data.fd == door)
                accept_all(door);
            else
                pass_on(events[at].data.fd);
        }
    }
}
