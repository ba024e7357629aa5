/* The machine's time of day, moved for one process by the seconds that the file at $WALL_OFFSET
   says: to be preloaded. Every other clock is the machine's own. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    long offset_s = 0;
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    const char *path = getenv("WALL_OFFSET");
    if (failed || clock != CLOCK_REALTIME || !path) return failed;
    FILE *file = fopen(path, "re");
    if (file) {
        if (fscanf(file, "%ld", &offset_s) == 1) now->tv_sec += offset_s;
        fclose(file);
    }
    return 0;
}
