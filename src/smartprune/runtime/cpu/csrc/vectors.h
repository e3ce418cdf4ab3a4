/* Vector types of WIDTH numbers, and the primitives that an instruction set provides for them.

   ISA_HEADER may define any of these functions, for any WIDTH; for each it also defines a macro HAVE_ followed by the name
   in capitals. conv.c and values.h contain portable code for the others.

   void products(...)                               the sums of a tile, see conv.c
   vint dot(vint sum, vint weight, int32_t x)       sum plus the products of the quantized numbers in x with those in weight
   vfloat at_least(vfloat bound, vfloat v)          the larger of the two; NaN in v stays NaN, as in torch
   vfloat at_most(vfloat bound, vfloat v)           the smaller of the two; likewise
   vfloat from_quanta(const quantum *q)             WIDTH quantized numbers as floats
   void store_quanta(quantum *q, vint bits)         stores the low 8 bits of every number
   void store_four(quantum *q, const vfloat *v, const int COUNT, vfloat low, vfloat high)
                                                    stores COUNT vectors, at most 4: bounded and rounded, one after the other
   vquantum largest_quanta(vquantum a, vquantum b)  the larger of each pair
   vfloat from_halves(const half *h)                WIDTH float16 numbers as floats
   void store_halves(half *h, vfloat v)             rounds to float16; numbers beyond its range become the last in it
   taps load_taps(const quantum *q), ...            products of 4 neighbouring pixels, see windows.h
   void transpose(vfloat *v)                        transposes WIDTH rows of WIDTH numbers
   vfloat load_some(const float *from, int count)   loads `count` numbers; the rest is zero
   void save_some(float *to, vfloat v, int count)   stores the first `count` numbers */
#ifndef SMARTPRUNE_VECTORS_H
#define SMARTPRUNE_VECTORS_H
#include "runtime.h"

#define INLINE static inline __attribute__((always_inline))

typedef float vfloat __attribute__((vector_size(4 * WIDTH)));
typedef float vfloat_u __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t vint __attribute__((vector_size(4 * WIDTH)));
typedef int32_t vint_u __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef half vhalf __attribute__((vector_size(2 * WIDTH)));
typedef half vhalf_u __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));
typedef quantum vquantum __attribute__((vector_size(WIDTH * sizeof(quantum))));
typedef quantum vquantum_u __attribute__((vector_size(WIDTH * sizeof(quantum)), aligned(1), may_alias));

#ifdef ISA_HEADER
#include ISA_HEADER
#endif

INLINE vfloat all(float value) { return (vfloat){0} + value; }
INLINE vfloat choose(vint mask, vfloat yes, vfloat no) { return (vfloat)((mask & (vint)yes) | (~mask & (vint)no)); }
#ifndef HAVE_AT_LEAST
INLINE vfloat at_least(vfloat bound, vfloat v) { return choose(bound > v, bound, v); }
#endif
#ifndef HAVE_AT_MOST
INLINE vfloat at_most(vfloat bound, vfloat v) { return choose(bound < v, bound, v); }
#endif

#define HIGHEST_HALF 65504.0f
#ifndef HAVE_FROM_HALVES
/* The exponents of float16 and float32 differ by 112. The smallest float16 numbers, whose exponent bits are zero, become exact by
   a subtraction. */
INLINE vfloat from_halves(const half *h) {
  const vint bits = __builtin_convertvector(*(const vhalf_u *)h, vint), magnitude = (bits & 0x7fff) << 13;
  const vint normal = magnitude + (112 << 23) + ((magnitude >= 0x7c00 << 13) & (112 << 23)); /* NaN has the largest exponent */
  const vfloat small = (vfloat)(magnitude + (113 << 23)) - 0x1p-14f;
  return (vfloat)((vint)choose(magnitude < 0x400 << 13, small, (vfloat)normal) | (bits & 0x8000) << 16);
}
#endif
#ifndef HAVE_STORE_HALVES
/* Rounds to nearest, ties to even. For the smallest numbers, an addition rounds. */
INLINE void store_halves(half *h, vfloat v) {
  const vint bits = (vint)at_most(all(HIGHEST_HALF), at_least(all(-HIGHEST_HALF), v)), magnitude = bits & 0x7fffffff;
  const vint normal = (magnitude - (112 << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const vint small = (vint)((vfloat)magnitude + 0.5f) - (126 << 23);
  const vint nan = (magnitude > 0x7f800000) & 0x7e00;
  const vint rounded = nan | (~(vint)(magnitude > 0x7f800000) & (vint)choose(magnitude < 113 << 23, (vfloat)small, (vfloat)normal));
  *(vhalf_u *)h = __builtin_convertvector(rounded | (bits >> 16 & 0x8000), vhalf);
}
#endif
#endif
