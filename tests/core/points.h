/* Scheduling points: compiled into the core in place of its atomics, locks, futexes and
 * descriptors (`cc -include points.h`), so that explorer.c decides who goes next.
 *
 * A point stands before each atomic access and each wait.  All ranks are coroutines of
 * one thread, so the access itself is a plain one.  What the core's sources call is
 * otherwise unchanged: malloc() counts from zero in each run (so that addresses are the
 * same in all), locks are the explorer's, clocks stand still between two looks.
 */
#ifndef SMP_TESTS_POINTS_H
#define SMP_TESTS_POINTS_H

#ifndef _GNU_SOURCE
#    define _GNU_SOURCE
#endif

/* Whatever declares what is replaced below. */
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* The running thread is about to read or write *object. */
void explore_point(const volatile void *object, bool writes, const char *where);

#undef atomic_load
#undef atomic_load_explicit
#undef atomic_store
#undef atomic_store_explicit
#undef atomic_exchange
#undef atomic_fetch_add
#undef atomic_fetch_add_explicit
#undef atomic_fetch_sub
#undef atomic_compare_exchange_strong

#define POINT_TYPE(object) __typeof__((void)0, *(object))

#define atomic_load(object) (explore_point((object), false, __func__), *(object))
#define atomic_load_explicit(object, order) atomic_load(object)

#define atomic_store(object, value)                                                    \
    __extension__({                                                                    \
        POINT_TYPE(object) stored_ = (value);                                          \
        explore_point((object), true, __func__);                                       \
        *(object) = stored_;                                                           \
        (void)0;                                                                       \
    })
#define atomic_store_explicit(object, value, order) atomic_store(object, value)

#define POINT_CHANGE(object, new_value)                                                \
    __extension__({                                                                    \
        POINT_TYPE(object) before_;                                                    \
        explore_point((object), true, __func__);                                       \
        before_ = *(object);                                                           \
        *(object) = (POINT_TYPE(object))(new_value);                                   \
        before_;                                                                       \
    })
#define atomic_exchange(object, value) POINT_CHANGE(object, value)
#define atomic_fetch_add(object, n) POINT_CHANGE(object, before_ + (n))
#define atomic_fetch_sub(object, n) POINT_CHANGE(object, before_ - (n))
#define atomic_fetch_add_explicit(object, n, order) atomic_fetch_add(object, n)

#define atomic_compare_exchange_strong(object, expected, value)                        \
    __extension__({                                                                    \
        bool same_;                                                                    \
        explore_point((object), true, __func__);                                       \
        same_ = *(object) == *(expected);                                              \
        if (same_) {                                                                   \
            *(object) = (value);                                                       \
        } else {                                                                       \
            *(expected) = *(object);                                                   \
        }                                                                              \
        same_;                                                                         \
    })

/* FUTEX_WAIT_BITSET and FUTEX_WAKE. */
long explore_syscall(long number, ...);
#define syscall explore_syscall

/* The eventfd of a loop, and the loop that waits for it: descriptors are numbers that
 * the test makes up, the loop's one more than its eventfd's. */
ssize_t explore_write(int fd, const void *from, size_t bytes);
ssize_t explore_read(int fd, void *to, size_t bytes);
int     explore_ppoll(const struct pollfd *fds, const struct timespec *limit);
int     explore_epoll_wait(int fd, struct epoll_event *events);
#define write(fd, from, bytes) explore_write(fd, from, bytes)
#define read(fd, to, bytes) explore_read(fd, to, bytes)
#define ppoll(fds, n, limit, mask) explore_ppoll(fds, limit)
#define epoll_wait(fd, events, most, limit) explore_epoll_wait(fd, events)

void explore_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex,
                       const struct timespec *until);
void explore_cond_wake(pthread_cond_t *cond, bool all);
#define pthread_cond_wait(cond, mutex) explore_cond_wait(cond, mutex, NULL)
#define pthread_cond_timedwait(cond, mutex, until) explore_cond_wait(cond, mutex, until)
#define pthread_cond_signal(cond) explore_cond_wake(cond, false)
#define pthread_cond_broadcast(cond) explore_cond_wake(cond, true)

#define sched_yield() ((void)0)

/* A thread that set_up() starts is the scenario's next without a function. */
int explore_start(void *(*run)(void *), void *arg);
int explore_join(void);
#define pthread_create(thread, attributes, run, arg)                                   \
    ((void)(thread), explore_start(run, arg))
#define pthread_join(thread, result) explore_join()
#define pthread_setname_np(thread, name) ((void)(name))

void *explore_malloc(size_t bytes);
void *explore_calloc(size_t n, size_t bytes);
char *explore_strdup(const char *text);
void  explore_free(void *memory);
#undef strdup
#define malloc(bytes) explore_malloc(bytes)
#define calloc(n, bytes) explore_calloc(n, bytes)
#define strdup(text) explore_strdup(text)
#define free(memory) explore_free(memory)

#endif
