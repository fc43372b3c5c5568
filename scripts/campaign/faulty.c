/* Calls of the C library that fail, wait or lie, for the campaign `faults`: loaded by LD_PRELOAD.

   FAULTS holds rules, with ';' between them, each of words NAME=VALUE:
     who=trainkit|guardian|launcher|wrapper|trainer  the process, by its command line; any without it
     calls=write+fsync  of open (to write), read (opening to read), write, fsync, rename, mkdir, close; all without it
     path=TEXT          part of the file's path
     switch=FILE        only while this file is there
     errno=N            the call fails so
     delay=MS           the call waits first
     hang=1             the call waits first for as long as the switch is there
     clock=SECONDS      the time of day is so much later (or earlier) */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct rule {
    char who[16], calls[64], path[256], when[256];
    long error, delay, hang, clock;
};

static struct rule rules[16];
static int count;

#define REAL(name) ((__typeof__(name) *)real_of(#name))

static void *real_of(const char *name) { return dlsym(RTLD_NEXT, name); }

static const char *who(void) {
    static char found[16];
    static pid_t known;
    if (known == getpid())
        return found;
    static char line[65536];
    int fd = REAL(open)("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? 0 : read(fd, line, sizeof line - 1);
    if (fd >= 0)
        REAL(close)(fd);
    for (ssize_t at = 0; at < size; at++)
        if (!line[at])
            line[at] = ' ';
    line[size < 0 ? 0 : size] = 0;
    static const char *marks[][2] = {
        {"supervisor.entry", "guardian"}, {"-m trainkit run", "trainkit"}, {"torch.distributed.run", "launcher"},
        {"deepspeed.launcher", "launcher"},  {"accelerate", "launcher"},      {"bin/deepspeed", "launcher"},
        {"bin/torchrun", "launcher"},        {"trainkit.runner.rank", "wrapper"}, {"trainkit.trainer", "trainer"},
    };
    strcpy(found, "other");
    for (size_t each = 0; each < sizeof marks / sizeof *marks; each++)
        if (strstr(line, marks[each][0])) {
            strcpy(found, marks[each][1]);
            break;
        }
    known = getpid();
    return found;
}

static void read_rules(void) {
    static atomic_int done;
    if (atomic_exchange(&done, 1) || !getenv("FAULTS"))
        return;
    char *text = strdup(getenv("FAULTS")), *outer = 0;
    for (char *each = strtok_r(text, ";", &outer); each && count < 16; each = strtok_r(0, ";", &outer)) {
        struct rule *rule = &rules[count];
        char *inner = 0;
        for (char *word = strtok_r(each, " ", &inner); word; word = strtok_r(0, " ", &inner)) {
            char *value = strchr(word, '=');
            if (!value)
                continue;
            *value++ = 0;
            if (!strcmp(word, "who")) snprintf(rule->who, sizeof rule->who, "%s", value);
            if (!strcmp(word, "calls")) snprintf(rule->calls, sizeof rule->calls, "+%s+", value);
            if (!strcmp(word, "path")) snprintf(rule->path, sizeof rule->path, "%s", value);
            if (!strcmp(word, "switch")) snprintf(rule->when, sizeof rule->when, "%s", value);
            if (!strcmp(word, "errno")) rule->error = atol(value);
            if (!strcmp(word, "delay")) rule->delay = atol(value);
            if (!strcmp(word, "hang")) rule->hang = atol(value);
            if (!strcmp(word, "clock")) rule->clock = atol(value);
        }
        count++;
    }
    free(text);
}

static int is_on(const struct rule *rule) { return !rule->when[0] || access(rule->when, F_OK) == 0; }

static void wait_ms(long ms) {
    struct timespec left = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

/* The error that a call of this path is to end with; 0 for none. */
static int fault(const char *call, const char *path) {
    char mark[24];
    int found = 0, before = errno;
    read_rules();
    snprintf(mark, sizeof mark, "+%s+", call);
    for (int at = 0; at < count && path; at++) {
        struct rule *rule = &rules[at];
        if (rule->clock || (rule->path[0] && !strstr(path, rule->path)) || (rule->calls[0] && !strstr(rule->calls, mark)))
            continue;
        if ((rule->who[0] && strcmp(rule->who, who())) || !is_on(rule))
            continue;
        if (rule->delay)
            wait_ms(rule->delay);
        while (rule->hang && is_on(rule))
            wait_ms(20);
        if (rule->error && !found)
            found = (int)rule->error;
    }
    errno = found ? found : before;
    return found;
}

static int fault_fd(const char *call, int fd) {
    char link[32], path[PATH_MAX];
    int before = errno;
    read_rules();
    if (!count)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    errno = before;
    if (size <= 0)
        return 0;
    path[size] = 0;
    return fault(call, path);
}

static const char *kind(int flags) { return flags & (O_WRONLY | O_RDWR | O_CREAT) ? "open" : "read"; }

#define OPEN(name)                                            \
    int name(const char *path, int flags, ...) {              \
        va_list rest;                                         \
        va_start(rest, flags);                                \
        mode_t mode = va_arg(rest, mode_t);                   \
        va_end(rest);                                         \
        if (fault(kind(flags), path))                         \
            return -1;                                        \
        return REAL(name)(path, flags, mode);                 \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                          \
    int name(int folder, const char *path, int flags, ...) {  \
        va_list rest;                                         \
        va_start(rest, flags);                                \
        mode_t mode = va_arg(rest, mode_t);                   \
        va_end(rest);                                         \
        if (fault(kind(flags), path))                         \
            return -1;                                        \
        return REAL(name)(folder, path, flags, mode);         \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                           \
    FILE *name(const char *path, const char *mode) {          \
        if (fault(strpbrk(mode, "wa+") ? "open" : "read", path)) \
            return 0;                                         \
        return REAL(name)(path, mode);                        \
    }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int fd, const void *data, size_t size) { return fault_fd("write", fd) ? -1 : REAL(write)(fd, data, size); }

ssize_t writev(int fd, const struct iovec *parts, int number) {
    return fault_fd("write", fd) ? -1 : REAL(writev)(fd, parts, number);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    return fault_fd("write", fd) ? -1 : REAL(pwrite)(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    return fault_fd("write", fd) ? -1 : REAL(pwrite64)(fd, data, size, at);
}

int fsync(int fd) { return fault_fd("fsync", fd) ? -1 : REAL(fsync)(fd); }

int close(int fd) {
    int found = fault_fd("close", fd), done = REAL(close)(fd);
    if (found)
        errno = found;
    return found ? -1 : done;
}

int rename(const char *from, const char *to) { return fault("rename", to) ? -1 : REAL(rename)(from, to); }

int mkdir(const char *path, mode_t mode) { return fault("mkdir", path) ? -1 : REAL(mkdir)(path, mode); }

static long shift(void) {
    read_rules();
    for (int at = 0; at < count; at++)
        if (rules[at].clock && (!rules[at].who[0] || !strcmp(rules[at].who, who())) && is_on(&rules[at]))
            return rules[at].clock;
    return 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int done = REAL(clock_gettime)(clock, now);
    if (!done && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += shift();
    return done;
}

int gettimeofday(struct timeval *now, void *zone) {
    int done = REAL(gettimeofday)(now, zone);
    if (!done)
        now->tv_sec += shift();
    return done;
}

time_t time(time_t *kept) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (kept)
        *kept = now.tv_sec;
    return now.tv_sec;
}
