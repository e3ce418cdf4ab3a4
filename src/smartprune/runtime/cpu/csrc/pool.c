/* A thread pool, and the function that runs a program on it.

   Threads without work spin for some tens of microseconds, about the time between two layers, and then sleep, so an idle
   pool uses no CPU time. New work wakes sleeping threads but does not wait for them: a thread takes part if it wakes up
   while the operation is still open. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdlib.h>

#include "exported.h"
#include "runtime.h"
#include "threads.h"

#define SPINS 1000
#define OPEN (1ull << 31)

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ __volatile__("yield")
#else
#define PAUSE() give_way()
#endif

typedef struct {
  int wanted, threads; /* wanted and started threads, without the caller */
  int64_t process;
  _Atomic uint64_t state; /* number of the operation << 32 | open << 31 | working threads */
  _Atomic int next, sleepers;
  const Op *op; /* the operation whose items are shared; 0: parts are shared */
  const External *external;
  const Parts *parts;
  _Atomic int arenas; /* taken by threads that work on parts */
  Lock lock;
  Condition wake;
} Pool;

/* The tensors of the caller from an image on. */
static const External *from_image(const Parts *parts, int arena, int64_t image, const External *external) {
  External *own = parts->external + (int64_t)arena * parts->externals;
  for (int i = 0; i < parts->externals; i++) {
    own[i] = external[i];
    own[i].data = (const float *)external[i].data + image * external[i].image;
  }
  return own;
}

static void take_parts(Pool *pool) {
  const Parts *parts = pool->parts;
  const int arena = atomic_fetch_add_explicit(&pool->arenas, 1, memory_order_relaxed);
  if (arena >= parts->arenas) return;
  const Op *ops = parts->ops + (int64_t)arena * parts->count;
  for (int part; (part = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed)) < parts->together;) {
    const External *own = from_image(parts, arena, (int64_t)part * parts->images, pool->external);
    for (int i = 0; i < parts->count; i++)
      for (int item = 0; item < ops[i].items; item++) sp_work(&ops[i], item, own);
  }
}

static void take(Pool *pool) {
  const Op *op = pool->op;
  if (!op) {
    take_parts(pool);
    return;
  }
  for (int item; (item = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed)) < op->items;)
    sp_work(op, item, pool->external);
}

THREAD(worker) {
  Pool *pool = argument;
  uint32_t seen = 0;
  for (int spins = 0;;) {
    uint64_t state = atomic_load_explicit(&pool->state, memory_order_acquire);
    if ((state & OPEN) && (uint32_t)(state >> 32) != seen) {
      if (!atomic_compare_exchange_weak(&pool->state, &state, state + 1)) continue;
      seen = (uint32_t)(state >> 32);
      take(pool);
      atomic_fetch_sub_explicit(&pool->state, 1, memory_order_release);
      spins = 0;
    } else if (++spins < SPINS) {
      PAUSE();
    } else {
      acquire(&pool->lock);
      atomic_fetch_add(&pool->sleepers, 1);
      for (;;) {
        state = atomic_load(&pool->state);
        if ((state & OPEN) && (uint32_t)(state >> 32) != seen) break;
        wait_for(&pool->wake, &pool->lock);
      }
      atomic_fetch_sub(&pool->sleepers, 1);
      release(&pool->lock);
      spins = 0;
    }
  }
  return 0;
}

static void share(Pool *pool, const Op *op, const External *external) {
  pool->op = op;
  pool->external = external;
  atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
  atomic_store_explicit(&pool->arenas, 0, memory_order_relaxed);
  const uint64_t number = (atomic_load(&pool->state) >> 32) + 1;
  atomic_store(&pool->state, (number & 0xffffffffu) << 32 | OPEN);
  if (atomic_load(&pool->sleepers)) {
    acquire(&pool->lock);
    wake_all(&pool->wake);
    release(&pool->lock);
  }
  take(pool);
  atomic_fetch_and(&pool->state, ~OPEN);
  for (int spins = 0; atomic_load_explicit(&pool->state, memory_order_acquire) & 0xffff; spins++) {
    if (spins < SPINS) PAUSE();
    else give_way();
  }
}

/* Starts the threads of this process. A forked process has none of its parent's threads, which may have held the lock or
   been at work, so everything starts anew. */
static int start(Pool *pool) {
  pool->threads = 0;
  pool->process = this_process();
  atomic_store(&pool->state, 0);
  atomic_store(&pool->sleepers, 0);
  if (!initialize(&pool->lock, &pool->wake)) return 0;
  while (pool->threads < pool->wanted && start_thread(worker, pool)) pool->threads++; /* fewer threads only run slower */
  return 1;
}

EXPORTED Pool *sp_pool_new(int threads) {
  Pool *pool = calloc(1, sizeof *pool);
  if (!pool) return 0;
  pool->wanted = threads - 1;
  return start(pool) ? pool : 0;
}

/* Runs the program once. `light[i]` says that operation i is too small for several threads. */
EXPORTED void sp_run(Pool *pool, const Op *ops, int count, const uint8_t *light, const External *external) {
  if (pool->process != this_process()) start(pool);
  const int single = pool->threads == 0;
  for (int i = 0; i < count; i++) {
    if (single || light[i] || ops[i].items < 2)
      for (int item = 0; item < ops[i].items; item++) sp_work(&ops[i], item, external);
    else
      share(pool, &ops[i], external);
  }
}

/* Runs the program on a batch part by part. Threads work on different parts while there is one for each of them; they divide
   the operations of the last parts. */
EXPORTED void sp_run_parts(Pool *pool, const Parts *parts, const uint8_t *light, const External *external) {
  if (pool->process != this_process()) start(pool);
  int part = 0;
  if (pool->threads && parts->together) {
    pool->parts = parts;
    share(pool, 0, external);
    part = parts->together;
  }
  for (; part < parts->parts; part++)
    sp_run(pool, parts->ops, parts->count, light, from_image(parts, 0, (int64_t)part * parts->images, external));
}

/* Layout and names, for the check in abi.py. */
EXPORTED int sp_tensor_size(void) { return (int)sizeof(Tensor); }
EXPORTED int sp_op_size(void) { return (int)sizeof(Op); }
EXPORTED int sp_external_size(void) { return (int)sizeof(External); }
EXPORTED int sp_parts_size(void) { return (int)sizeof(Parts); }

#define NAME(name) #name " "
EXPORTED const char *sp_operations(void) { return OPERATIONS(NAME); }
EXPORTED const char *sp_activations(void) { return ACTIVATIONS(NAME); }
EXPORTED const char *sp_additions(void) { return ADDITIONS(NAME); }
EXPORTED const char *sp_types(void) { return TYPES(NAME); }
