/* Whether this machine has an instruction set: one function for each, from the table in instruction_sets.py.

   The build defines PROBES as PROBE(name, condition) PROBE(name, condition) ... */
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#define HAS_DOTPROD (getauxval(AT_HWCAP) >> 20 & 1)
#define HAS_I8MM (getauxval(AT_HWCAP2) >> 13 & 1)
#elif defined(__aarch64__) && defined(__APPLE__)
#include <stddef.h>
#include <sys/sysctl.h>
static int feature(const char *name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, NULL, 0) == 0 && value;
}
#define HAS_DOTPROD feature("hw.optional.arm.FEAT_DotProd")
#define HAS_I8MM feature("hw.optional.arm.FEAT_I8MM")
#else
#define HAS_DOTPROD 0
#define HAS_I8MM 0
#endif

static void initialize(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
#endif
}

#define PROBE(name, condition)    \
  int sp_has_##name(void) {       \
    initialize();                 \
    return (condition) ? 1 : 0;   \
  }
PROBES
