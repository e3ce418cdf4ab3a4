/* Whether this machine has an instruction set: one function for each, from the table in instruction_sets.py.

   The build defines PROBES as PROBE(name, condition) PROBE(name, condition) ... */
#if defined(__linux__)
#include <sys/auxv.h> /* getauxval, for conditions on ARM */
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
