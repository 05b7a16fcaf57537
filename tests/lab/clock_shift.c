/* Gives the processes of one lab host a wall clock of their own: CLOCK_REALTIME plus a shift.
 *
 * Loaded with LD_PRELOAD. The shift, in nanoseconds, lies in a shared file that the test writes, so it can
 * jump while they run. CLOCK_MONOTONIC is left alone. Waits until a moment of CLOCK_REALTIME are cut into
 * slices, so that a jump reaches a process that waits already, as the kernel's clock would.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SLICE_NS 50000000LL
#define SECOND_NS 1000000000LL

static volatile const int64_t *shift_ns;

static int (*real_clock_gettime)(clockid_t, struct timespec *);
static int (*real_cond_timedwait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*real_cond_clockwait)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
static int (*real_sem_timedwait)(sem_t *, const struct timespec *);
static int (*real_sem_clockwait)(sem_t *, clockid_t, const struct timespec *);
static int (*real_clock_nanosleep)(clockid_t, int, const struct timespec *, struct timespec *);
static long (*real_syscall)(long, long, long, long, long, long, long);

static void *find(const char *name, const char *version) {
    void *found = version ? dlvsym(RTLD_NEXT, name, version) : NULL;
    return found ? found : dlsym(RTLD_NEXT, name);
}

__attribute__((constructor)) static void begin(void) {
    if (real_clock_gettime) return;
    real_cond_timedwait = find("pthread_cond_timedwait", "GLIBC_2.3.2"); /* an unversioned one is the oldest */
    real_cond_clockwait = find("pthread_cond_clockwait", NULL);
    real_sem_timedwait = find("sem_timedwait", NULL);
    real_sem_clockwait = find("sem_clockwait", NULL);
    real_clock_nanosleep = find("clock_nanosleep", "GLIBC_2.17");
    real_syscall = find("syscall", NULL);
    const char *path = getenv("LAB_CLOCK_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
        if (mapped != MAP_FAILED) shift_ns = mapped;
        close(file);
    }
    real_clock_gettime = find("clock_gettime", "GLIBC_2.17");
}

static int64_t shift(void) {
    if (!real_clock_gettime) begin();
    return shift_ns ? *shift_ns : 0;
}

static int64_t ns_of(const struct timespec *t) { return t->tv_sec * SECOND_NS + t->tv_nsec; }

static struct timespec timespec_of(int64_t ns) {
    struct timespec t = {ns / SECOND_NS, ns % SECOND_NS};
    return t;
}

static int is_wall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

/* Seconds since 1970, not since boot: a condition does not tell the clock that it was made for. */
static int looks_like_wall(const struct timespec *t) { return t->tv_sec > 500000000; }

/* The machine's moment at which to wake: the deadline, or the end of a slice (then *whole is 0). */
static struct timespec wake_at(const struct timespec *deadline, int *whole) {
    struct timespec now;
    int64_t moved = shift(); /* also finds the real functions */
    real_clock_gettime(CLOCK_REALTIME, &now);
    if (deadline->tv_sec > INT64_MAX / SECOND_NS - 1 || ns_of(deadline) - moved > ns_of(&now) + SLICE_NS) {
        *whole = 0;
        return timespec_of(ns_of(&now) + SLICE_NS);
    }
    *whole = 1;
    int64_t at = ns_of(deadline) - moved;
    return timespec_of(at > 0 ? at : 0);
}

int clock_gettime(clockid_t clock, struct timespec *t) {
    int64_t moved = shift();
    int result = real_clock_gettime(clock, t);
    if (result == 0 && is_wall(clock)) *t = timespec_of(ns_of(t) + moved);
    return result;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}

/* The end of a slice is a spurious wake-up, which every user of a condition has to expect. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline) {
    int whole;
    if (!looks_like_wall(deadline)) {
        if (!real_cond_timedwait) begin();
        return real_cond_timedwait(condition, mutex, deadline);
    }
    struct timespec at = wake_at(deadline, &whole);
    int result = real_cond_timedwait(condition, mutex, &at);
    return result == ETIMEDOUT && !whole ? 0 : result;
}

int pthread_cond_clockwait(
    pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock, const struct timespec *deadline) {
    int whole;
    if (!is_wall(clock)) {
        if (!real_cond_clockwait) begin();
        return real_cond_clockwait(condition, mutex, clock, deadline);
    }
    struct timespec at = wake_at(deadline, &whole);
    int result = real_cond_clockwait(condition, mutex, clock, &at);
    return result == ETIMEDOUT && !whole ? 0 : result;
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    for (int whole = 0;;) {
        struct timespec at = wake_at(deadline, &whole);
        int result = real_sem_timedwait(semaphore, &at);
        if (result == 0 || errno != ETIMEDOUT || whole) return result;
    }
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict deadline) {
    if (is_wall(clock)) return sem_timedwait(semaphore, deadline);
    if (!real_sem_clockwait) begin();
    return real_sem_clockwait(semaphore, clock, deadline);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *time, struct timespec *left) {
    if (!real_clock_nanosleep) begin();
    if (!is_wall(clock) || !(flags & TIMER_ABSTIME)) return real_clock_nanosleep(clock, flags, time, left);
    for (int whole = 0;;) {
        struct timespec at = wake_at(time, &whole);
        int result = real_clock_nanosleep(clock, flags, &at, left);
        if (result != 0 || whole) return result;
    }
}

/* Libraries that bring locks of their own wait on futexes without asking the C library. */
long syscall(long number, ...) {
    long a[6];
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(arguments, long);
    va_end(arguments);
    if (!real_syscall) begin();
    int until_wall = number == SYS_futex && a[3] && (a[1] & FUTEX_CLOCK_REALTIME) &&
                     (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET;
    if (!until_wall) return real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    for (int whole = 0;;) {
        struct timespec at = wake_at((const struct timespec *)a[3], &whole);
        long result = real_syscall(number, a[0], a[1], a[2], (long)&at, a[4], a[5]);
        if (result == 0 || errno != ETIMEDOUT || whole) return result;
    }
}
