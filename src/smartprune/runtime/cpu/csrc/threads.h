/* What the thread pool needs from the system, for POSIX and for Windows. */
#ifndef SMARTPRUNE_THREADS_H
#define SMARTPRUNE_THREADS_H

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
typedef SRWLOCK Lock;
typedef CONDITION_VARIABLE Condition;
#define THREAD(name) static DWORD WINAPI name(void *argument)

static int initialize(Lock *lock, Condition *condition) {
  InitializeSRWLock(lock);
  InitializeConditionVariable(condition);
  return 1;
}
static void acquire(Lock *lock) { AcquireSRWLockExclusive(lock); }
static void release(Lock *lock) { ReleaseSRWLockExclusive(lock); }
static void wait_for(Condition *condition, Lock *lock) { SleepConditionVariableSRW(condition, lock, INFINITE, 0); }
static void wake_all(Condition *condition) { WakeAllConditionVariable(condition); }
static void give_way(void) { SwitchToThread(); }
static int64_t this_process(void) { return (int64_t)GetCurrentProcessId(); }
static int start_thread(DWORD(WINAPI *function)(void *), void *argument) {
  const HANDLE thread = CreateThread(0, 0, function, argument, 0, 0);
  if (thread) CloseHandle(thread); /* the thread runs on */
  return thread != 0;
}

#else
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
typedef pthread_mutex_t Lock;
typedef pthread_cond_t Condition;
#define THREAD(name) static void *name(void *argument)

static int initialize(Lock *lock, Condition *condition) { return !pthread_mutex_init(lock, 0) && !pthread_cond_init(condition, 0); }
static void acquire(Lock *lock) { pthread_mutex_lock(lock); }
static void release(Lock *lock) { pthread_mutex_unlock(lock); }
static void wait_for(Condition *condition, Lock *lock) { pthread_cond_wait(condition, lock); }
static void wake_all(Condition *condition) { pthread_cond_broadcast(condition); }
static void give_way(void) { sched_yield(); }
static int64_t this_process(void) { return (int64_t)getpid(); }
static int start_thread(void *(*function)(void *), void *argument) {
  pthread_t thread;
  if (pthread_create(&thread, 0, function, argument)) return 0;
  pthread_detach(thread);
  return 1;
}
#endif
#endif
