/* The 16 channels of a block as vectors: activations, and loading and storing float32, float16 and quantized numbers. */
#ifndef SMARTPRUNE_VALUES_H
#define SMARTPRUNE_VALUES_H
#define WIDTH LANES
#include "vectors.h"

#include <math.h>
#include <string.h>

#define UNROLL _Pragma("GCC unroll 8")
#define MAGIC 12582912.0f /* 1.5 * 2^23: adding it rounds to nearest, ties to even, and leaves the integer in the low bits */

INLINE vfloat clamp(vfloat v, float low, float high) { return at_most(all(high), at_least(all(low), v)); }

/* e^v with a relative error below 2e-7: 2^n through the exponent bits, the rest through a polynomial. */
INLINE vfloat exponential(vfloat v) {
  v = clamp(v, -87.0f, 88.0f);
  const vfloat n = (v * 1.44269504f + MAGIC) - MAGIC;
  const vfloat r = (v - n * 0.693359375f) + n * 2.12194440e-4f;
  vfloat p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * (vfloat)((__builtin_convertvector(n, vint) + 127) << 23);
}

INLINE vfloat gelu(vfloat v) {
  for (int l = 0; l < LANES; l++) v[l] = 0.5f * v[l] * (1.0f + erff(v[l] * 0.70710678f));
  return v;
}

/* v tanh(log(1 + e^v)), with tanh(log(1 + e)) = (e^2 + 2e) / (e^2 + 2e + 2) */
INLINE vfloat mish(vfloat v) {
  const vfloat e = exponential(at_most(all(20.0f), v)), n = e * (e + 2.0f);
  return v * (n / (n + 2.0f));
}

INLINE vfloat activated(const Op *op, vfloat v) {
#define RETURN(kind, value)          \
  case kind:                         \
    if (APPLIES(kind)) return value; \
    break;
  switch (op->activation) {
    RETURN(SILU, v / (1.0f + exponential(-v)))
    RETURN(SIGMOID, 1.0f / (1.0f + exponential(-v)))
    RETURN(HARDSWISH, v * clamp(v + 3.0f, 0.0f, 6.0f) * (1.0f / 6.0f))
    RETURN(HARDSIGMOID, clamp(v + 3.0f, 0.0f, 6.0f) * (1.0f / 6.0f))
    RETURN(LEAKY, choose(v < 0.0f, v * op->slope, v))
    RETURN(GELU, gelu(v))
    RETURN(TANH, 1.0f - 2.0f / (1.0f + exponential(2.0f * v)))
    RETURN(ELU, choose(v < 0.0f, (exponential(v) - 1.0f) * op->slope, v))
    RETURN(GELU_TANH, v / (1.0f + exponential(-1.5957691f * (v + 0.044715f * v * v * v))))
    RETURN(MISH, mish(v))
  }
  return clamp(v, op->low, op->high);
#undef RETURN
}

/* Compilers split a generic conversion of vectors into scalar ones, hence these primitives. */
#ifndef HAVE_FROM_QUANTA
INLINE vfloat from_quanta(const quantum *q) {
  float v[LANES];
  for (int l = 0; l < LANES; l++) v[l] = (float)q[l];
  return *(const vfloat_u *)v;
}
#endif
#ifndef HAVE_STORE_QUANTA
INLINE void store_quanta(quantum *q, vint bits) {
  for (int l = 0; l < LANES; l++) q[l] = (quantum)(bits[l] & 0x1ff);
}
#endif
#ifndef HAVE_LARGEST_QUANTA
INLINE vquantum largest_quanta(vquantum a, vquantum b) {
  const vquantum larger = (vquantum)(b > a);
  return (larger & b) | (~larger & a);
}
#endif
#ifndef HAVE_TRANSPOSE
INLINE void transpose(vfloat *v) {
  float t[LANES][LANES];
  for (int r = 0; r < LANES; r++)
    for (int c = 0; c < LANES; c++) t[c][r] = ((const float *)&v[r])[c];
  memcpy(v, t, sizeof t);
}
#endif
#ifndef HAVE_LOAD_SOME
INLINE vfloat load_some(const float *from, int count) {
  vfloat v = {0};
  memcpy(&v, from, 4 * (size_t)count);
  return v;
}
#endif
#ifndef HAVE_SAVE_SOME
INLINE void save_some(float *to, vfloat v, int count) { memcpy(to, &v, 4 * (size_t)count); }
#endif

/* The type is an argument of its own, so a loop that is compiled for one type does not test it again. */
INLINE vfloat raw(int type, const Tensor *t, int64_t at) {
  if (type == FLOAT32) return *(const vfloat_u *)((const float *)t->data + at);
  if (type == FLOAT16) return from_halves((const half *)t->data + at);
  return from_quanta((const quantum *)t->data + at);
}

INLINE vfloat load_as(int type, const Tensor *t, int64_t at) {
  return type == FLOAT32 ? raw(FLOAT32, t, at) : (raw(type, t, at) - t->zero) * t->scale;
}

INLINE void save_as(int type, const Tensor *t, int64_t at, vfloat v) {
  if (type == FLOAT32) {
    *(vfloat_u *)((float *)t->data + at) = v;
    return;
  }
  if (type == FLOAT16) {
    store_halves((half *)t->data + at, v * (1.0f / t->scale));
    return;
  }
  v = clamp(v * (1.0f / t->scale) + t->zero, LOWEST_QUANTUM, HIGHEST_QUANTUM);
  store_quanta((quantum *)t->data + at, (vint)(v + MAGIC));
}

INLINE vfloat load(const Tensor *t, int64_t at) { return load_as(t->type, t, at); }
INLINE void save(const Tensor *t, int64_t at, vfloat v) { save_as(t->type, t, at, v); }

/* Whether x and y are float32 and the activation is a clamp: this case is compiled separately. */
INLINE int plain(const Op *op) { return op->x.type == FLOAT32 && op->y.type == FLOAT32 && op->activation == CLAMP; }

INLINE int64_t origin(const Tensor *t, int item) {
  return (int64_t)(item / t->blocks) * t->image + (int64_t)(item % t->blocks) * t->plane;
}
#endif
