/* Whether this machine has an instruction set: one function for each, from the table in instruction_sets.py.

   The build defines PROBES as PROBE(name, condition) PROBE(name, condition) ... */
#include "exported.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#define HAS_FLOAT16 (getauxval(AT_HWCAP) >> 10 & 1)
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
#define HAS_FLOAT16 feature("hw.optional.arm.FEAT_FP16")
#define HAS_DOTPROD feature("hw.optional.arm.FEAT_DotProd")
#define HAS_I8MM feature("hw.optional.arm.FEAT_I8MM")
#else
#define HAS_FLOAT16 0
#define HAS_DOTPROD 0
#define HAS_I8MM 0
#endif

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
/* Whether these registers are saved when the system changes between threads. Compilers know all this as __builtin_cpu_supports,
   which needs a library that is not there on Windows. */
static int saves(unsigned registers) {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0;
  __asm__ __volatile__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  return (a & registers) == registers;
}
enum { EBX, ECX };
static int all_bits(int leaf, int place, unsigned bits) {
  unsigned r[4];
  if (!__get_cpuid_count((unsigned)leaf, 0, &r[2], &r[EBX], &r[ECX], &r[3])) return 0;
  return (r[place] & bits) == bits;
}
#define BIT(number) (1u << (number))
#define HAS_AVX2 (saves(BIT(1) | BIT(2)) && all_bits(1, ECX, BIT(12)) && all_bits(7, EBX, BIT(5))) /* with FMA */
#define HAS_AVX512 /* with DQ, BW and VL */                                                   \
  (HAS_AVX2 && saves(BIT(1) | BIT(2) | BIT(5) | BIT(6) | BIT(7)) &&                           \
   all_bits(7, EBX, BIT(16) | BIT(17) | BIT(30) | BIT(31)))
#define HAS_VNNI all_bits(7, ECX, BIT(11))
#endif

#define PROBE(name, condition)           \
  EXPORTED int sp_has_##name(void) {     \
    return (condition) ? 1 : 0;          \
  }
PROBES
