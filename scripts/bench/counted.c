/* Counts the bytes of aligned memory, which torch's tensors on a CPU lie in, by whatever thread gives it back.
   cc -O2 -shared -fPIC -o counted.so counted.c -ldl; LD_PRELOAD=counted.so. With counted_limit, or COUNTED_LIMIT bytes
   in the environment, what is above fails. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define PLACES (1u << 22)

static struct { uintptr_t at; size_t size; } held[PLACES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t now, peak, limit = SIZE_MAX, refused;
static int (*real_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);

size_t counted_now(void) { return now; }
size_t counted_peak(void) { return peak; }
size_t counted_refused(void) { return refused; }
void counted_reset(void) { peak = now; }
void counted_limit(size_t bytes) { limit = bytes; }

__attribute__((constructor)) static void from_environment(void) {
    const char *bytes = getenv("COUNTED_LIMIT");
    if (bytes) limit = strtoull(bytes, NULL, 10);
}

static size_t place_of(uintptr_t at) { return (at >> 6) * 2654435761u & (PLACES - 1); }

int posix_memalign(void **made, size_t alignment, size_t size) {
    if (!real_memalign) real_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    pthread_mutex_lock(&lock);
    int full = now + size > limit;
    if (full) refused = size;
    pthread_mutex_unlock(&lock);
    if (full) return ENOMEM;
    int failed = real_memalign(made, alignment, size);
    if (failed) return failed;
    pthread_mutex_lock(&lock);
    size_t place = place_of((uintptr_t)*made);
    while (held[place].at > 1) place = (place + 1) & (PLACES - 1); /* 1: given back */
    held[place].at = (uintptr_t)*made;
    held[place].size = size;
    now += size;
    if (now > peak) peak = now;
    pthread_mutex_unlock(&lock);
    return 0;
}

void free(void *given) {
    if (!real_free) real_free = dlsym(RTLD_NEXT, "free");
    if (given && !((uintptr_t)given & 63)) {
        pthread_mutex_lock(&lock);
        for (size_t place = place_of((uintptr_t)given); held[place].at; place = (place + 1) & (PLACES - 1))
            if (held[place].at == (uintptr_t)given) {
                held[place].at = 1;
                now -= held[place].size;
                break;
            }
        pthread_mutex_unlock(&lock);
    }
    real_free(given);
}
