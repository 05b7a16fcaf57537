/* Who does the work? The calling thread and helpers that sleep between calls.
 *
 * Helpers start when first needed and never end; signals go to other threads. After a fork the child has none of them and
 * whatever state they left is abandoned: a child makes a pool of its own at its first call. A caller
 * that finds the helpers busy with another caller's work does its own alone: no caller waits for a lock.
 */
#ifndef BAGUA_THREADS_H
#define BAGUA_THREADS_H

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#define BAGUA_MAX_HELPERS 255

typedef void (*bagua_task)(void *argument, int64_t first, int64_t last);

typedef struct {
  pid_t owner;
  int busy; /* taken by a caller */
  int helpers;
  sem_t wake[BAGUA_MAX_HELPERS];
  sem_t finished;
  int unfinished; /* helpers at work */
  bagua_task task;
  void *argument;
  int64_t next, items, grain;
} bagua_pool;

typedef struct {
  bagua_pool *pool;
  int index;
} bagua_helper;

static bagua_pool *bagua_the_pool; /* never freed: helpers outlive every caller */

static void bagua_sleep_on(sem_t *semaphore) {
  while (sem_wait(semaphore) == -1 && errno == EINTR) {
  }
}

static void bagua_take_items(bagua_pool *pool) {
  for (;;) {
    int64_t first = __atomic_fetch_add(&pool->next, pool->grain, __ATOMIC_RELAXED);
    if (first >= pool->items) return;
    int64_t last = first + pool->grain < pool->items ? first + pool->grain : pool->items;
    pool->task(pool->argument, first, last);
  }
}

static void *bagua_help(void *argument) {
  bagua_helper me = *(bagua_helper *)argument;
  free(argument);
  for (;;) {
    bagua_sleep_on(&me.pool->wake[me.index]);
    bagua_take_items(me.pool);
    if (__atomic_sub_fetch(&me.pool->unfinished, 1, __ATOMIC_ACQ_REL) == 0) sem_post(&me.pool->finished);
  }
  return NULL;
}

static int bagua_start_helper(bagua_pool *pool) {
  int index = pool->helpers;
  bagua_helper *me = malloc(sizeof *me);
  if (!me || sem_init(&pool->wake[index], 0, 0) != 0) {
    free(me);
    return 0;
  }
  *me = (bagua_helper){pool, index};
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before); /* a new thread inherits the mask */
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, 1 << 20);
  pthread_t thread;
  int failed = pthread_create(&thread, &attributes, bagua_help, me);
  pthread_attr_destroy(&attributes);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (failed) {
    sem_destroy(&pool->wake[index]);
    free(me);
    return 0;
  }
  pool->helpers++;
  return 1;
}

/* This process's pool, taken for one call; NULL if it is in use or there is no memory. */
static bagua_pool *bagua_take_pool(void) {
  bagua_pool *pool = __atomic_load_n(&bagua_the_pool, __ATOMIC_ACQUIRE);
  if (!pool || pool->owner != getpid()) {
    bagua_pool *fresh = calloc(1, sizeof *fresh);
    if (!fresh || sem_init(&fresh->finished, 0, 0) != 0) {
      free(fresh);
      return NULL;
    }
    fresh->owner = getpid();
    if (__atomic_compare_exchange_n(&bagua_the_pool, &pool, fresh, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
      pool = fresh;
    else
      free(fresh); /* another thread was first, and `pool` is now its pool */
  }
  return __atomic_exchange_n(&pool->busy, 1, __ATOMIC_ACQUIRE) ? NULL : pool;
}

/* task over items 0 to items - 1, at least `grain` at a time, by at most `threads` threads with the caller. */
static void bagua_share(bagua_task task, void *argument, int64_t items, int64_t grain, int threads) {
  int64_t useful = (items + grain - 1) / grain;
  int64_t helpers = (threads < useful ? threads : useful) - 1;
  if (helpers > BAGUA_MAX_HELPERS) helpers = BAGUA_MAX_HELPERS;
  bagua_pool *pool = helpers > 0 ? bagua_take_pool() : NULL;
  if (!pool) {
    task(argument, 0, items);
    return;
  }
  while (pool->helpers < helpers && bagua_start_helper(pool)) {
  }
  if (helpers > pool->helpers) helpers = pool->helpers;
  pool->task = task;
  pool->argument = argument;
  pool->items = items;
  pool->grain = grain;
  pool->next = 0;
  __atomic_store_n(&pool->unfinished, (int)helpers, __ATOMIC_RELEASE);
  for (int64_t i = 0; i < helpers; i++) sem_post(&pool->wake[i]);
  bagua_take_items(pool);
  if (helpers > 0) bagua_sleep_on(&pool->finished);
  __atomic_store_n(&pool->busy, 0, __ATOMIC_RELEASE);
}

#endif
