/* All operations but the kernels of convolution. They handle the 16 channels of a block as one vector. */
#include "runtime.h"

#include <math.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define MAGIC 12582912.0f /* 1.5 * 2^23: adding it rounds to nearest, ties to even, and leaves the integer in the low bits */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vec_u __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef quantum quanta __attribute__((vector_size(LANES * sizeof(quantum))));
typedef quantum quanta_u __attribute__((vector_size(LANES * sizeof(quantum)), aligned(1), may_alias));

INLINE vec all(float value) { return (vec){0} + value; }
INLINE vec choose(ints mask, vec yes, vec no) { return (vec)((mask & (ints)yes) | (~mask & (ints)no)); }
/* NaN in v stays NaN, as torch has it */
#if defined(__AVX512F__)
INLINE vec larger(vec bound, vec v) { return (vec)_mm512_max_ps((__m512)bound, (__m512)v); }
INLINE vec smaller(vec bound, vec v) { return (vec)_mm512_min_ps((__m512)bound, (__m512)v); }
#else
INLINE vec larger(vec bound, vec v) { return choose(bound > v, bound, v); }
INLINE vec smaller(vec bound, vec v) { return choose(bound < v, bound, v); }
#endif
INLINE vec at_least(float bound, vec v) { return larger(all(bound), v); }
INLINE vec at_most(float bound, vec v) { return smaller(all(bound), v); }
INLINE vec clamp(vec v, float low, float high) { return at_most(high, at_least(low, v)); }

/* e^v, relative error below 2e-7: 2^n by the exponent bits, the rest by a polynomial. */
INLINE vec exponential(vec v) {
  v = clamp(v, -87.0f, 88.0f);
  const vec n = (v * 1.44269504f + MAGIC) - MAGIC;
  const vec r = (v - n * 0.693359375f) + n * 2.12194440e-4f;
  vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * (vec)((__builtin_convertvector(n, ints) + 127) << 23);
}

INLINE vec activated(const Op *op, vec v) {
  switch (op->activation) {
    case SILU: return v / (1.0f + exponential(-v));
    case SIGMOID: return 1.0f / (1.0f + exponential(-v));
    case HARDSWISH: return v * clamp(v + 3.0f, 0.0f, 6.0f) * (1.0f / 6.0f);
    case HARDSIGMOID: return clamp(v + 3.0f, 0.0f, 6.0f) * (1.0f / 6.0f);
    case LEAKY: return choose(v < 0.0f, v * op->slope, v);
    case GELU:
      for (int l = 0; l < LANES; l++) v[l] = 0.5f * v[l] * (1.0f + erff(v[l] * 0.70710678f));
      return v;
    default: return clamp(v, op->low, op->high);
  }
}

/* Spelled out: compilers take a generic conversion of vectors apart, number by number. */
INLINE vec from_quanta(const quantum *q) {
#if BYTES
  return (vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)q)));
#else
  float v[LANES];
  for (int l = 0; l < LANES; l++) v[l] = (float)q[l];
  return *(const vec_u *)v;
#endif
}

/* The type is given apart from the tensor, so that a loop compiled for one type does not ask again. */
INLINE vec raw(int type, const Tensor *t, int64_t at) {
  if (type == FLOAT32) return *(const vec_u *)((const float *)t->data + at);
  return from_quanta((const quantum *)t->data + at);
}

INLINE vec load_as(int type, const Tensor *t, int64_t at) {
  return type == FLOAT32 ? raw(FLOAT32, t, at) : (raw(QUANTUM, t, at) - t->zero) * t->scale;
}

INLINE void save_as(int type, const Tensor *t, int64_t at, vec v) {
  if (type == FLOAT32) {
    *(vec_u *)((float *)t->data + at) = v;
    return;
  }
  v = clamp(v * (1.0f / t->scale) + t->zero, 0.0f, 255.0f);
  const ints bits = (ints)(v + MAGIC);
  quantum *q = (quantum *)t->data + at;
#if BYTES
  _mm_storeu_si128((__m128i *)q, _mm512_cvtepi32_epi8((__m512i)bits));
#else
  for (int l = 0; l < LANES; l++) q[l] = (quantum)(bits[l] & 0x1ff);
#endif
}

INLINE vec load(const Tensor *t, int64_t at) { return load_as(t->type, t, at); }
INLINE void save(const Tensor *t, int64_t at, vec v) { save_as(t->type, t, at, v); }

/* Whether all tensors of an operation are float32 and a clamp ends it: the case that is compiled on its own. */
INLINE int plain(const Op *op) { return op->x.type == FLOAT32 && op->y.type == FLOAT32 && op->activation == CLAMP; }

INLINE int64_t origin(const Tensor *t, int item) {
  return (int64_t)(item / t->blocks) * t->image + (int64_t)(item % t->blocks) * t->plane;
}

void sp_finish(const Op *op, float *values, int pixels, int lanes, int64_t side) {
  float v[LANES] = {0}, z[LANES] = {0};
  const float unit = op->y.type == QUANTUM ? 1.0f / op->y.scale : 1.0f; /* the kernel stores quanta */
  for (int p = 0; p < pixels; p++) {
    memcpy(v, values + p * lanes, 4 * (size_t)lanes);
    if (op->adding)
      for (int l = 0; l < lanes; l++) {
        const int64_t at = side + (int64_t)p * LANES + l;
        z[l] = op->z.type == FLOAT32 ? ((const float *)op->z.data)[at] : (((const quantum *)op->z.data)[at] - op->z.zero) * op->z.scale;
      }
    vec r = *(vec_u *)v;
    if (op->adding == ADD_BEFORE) r += *(vec_u *)z;
    r = activated(op, r);
    if (op->adding == ADD_AFTER) r += *(vec_u *)z;
    r *= unit;
    memcpy(values + p * lanes, &r, 4 * (size_t)lanes);
  }
}

/* Turns a square of 16 rows and 16 columns, given as rows. */
INLINE void turn(vec *v) {
#if defined(__AVX512F__)
  __m512 a[16], b[16];
  UNROLL for (int i = 0; i < 8; i++) {
    a[2 * i] = _mm512_unpacklo_ps((__m512)v[2 * i], (__m512)v[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_ps((__m512)v[2 * i], (__m512)v[2 * i + 1]);
  }
  UNROLL for (int i = 0; i < 4; i++) UNROLL for (int h = 0; h < 2; h++) {
    b[4 * i + 2 * h] = (__m512)_mm512_unpacklo_pd((__m512d)a[4 * i + h], (__m512d)a[4 * i + 2 + h]);
    b[4 * i + 2 * h + 1] = (__m512)_mm512_unpackhi_pd((__m512d)a[4 * i + h], (__m512d)a[4 * i + 2 + h]);
  }
  UNROLL for (int i = 0; i < 4; i++) { /* quarter j of b[4 q + i] is column 4 j + i of rows 4 q to 4 q + 3 */
    const __m512 lo = _mm512_shuffle_f32x4(b[i], b[4 + i], 0x44), hi = _mm512_shuffle_f32x4(b[i], b[4 + i], 0xee);
    const __m512 lo2 = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0x44), hi2 = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0xee);
    v[i] = (vec)_mm512_shuffle_f32x4(lo, lo2, 0x88);
    v[4 + i] = (vec)_mm512_shuffle_f32x4(lo, lo2, 0xdd);
    v[8 + i] = (vec)_mm512_shuffle_f32x4(hi, hi2, 0x88);
    v[12 + i] = (vec)_mm512_shuffle_f32x4(hi, hi2, 0xdd);
  }
#else
  float t[LANES][LANES];
  for (int r = 0; r < LANES; r++)
    for (int c = 0; c < LANES; c++) t[c][r] = ((const float *)&v[r])[c];
  memcpy(v, t, sizeof t);
#endif
}

INLINE vec load_some(const float *from, int count) {
#if defined(__AVX512F__)
  return (vec)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#else
  vec v = {0};
  memcpy(&v, from, 4 * (size_t)count);
  return v;
#endif
}

INLINE void save_some(float *to, vec v, int count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)v);
#else
  memcpy(to, &v, 4 * (size_t)count);
#endif
}

/* The caller's map as rows of pixels: one long row where rows follow each other without a gap. */
INLINE void as_rows(const External *e, int height, int width, int *rows, int *length) {
  const int one = e->row == width * e->column;
  *rows = one ? 1 : height;
  *length = one ? height * width : width;
}

/* Where pixel number ``p`` of row ``r`` of that is in the tensor. */
INLINE int64_t pixel(const Tensor *t, int r, int p) {
  const int h = r + p / t->width, w = p % t->width; /* of one long row r is 0, of another p is below the width */
  return h * t->row + (int64_t)w * LANES;
}

static void import(const Op *op, int item, const External *e) {
  const Tensor Y = op->y, *y = &Y; /* a copy: stores of bytes cannot change it */
  const External from = *e;
  const int block = item % y->blocks;
  const int real = y->channels - block * LANES < LANES ? y->channels - block * LANES : LANES;
  const float *x = (const float *)from.data + item / y->blocks * from.image + block * LANES * from.channel;
  const int64_t to = origin(y, item);
  int rows, length;
  as_rows(&from, y->height, y->width, &rows, &length);
  for (int r = 0; r < rows; r++) {
    const float *line = x + r * from.row;
    if (from.column == 1 && real > 4) {
      for (int p = 0; p < length; p += LANES) { /* a square of 16 channels and 16 pixels is turned at a time */
        const int count = length - p < LANES ? length - p : LANES;
        vec v[LANES];
        for (int l = 0; l < LANES; l++) v[l] = l < real ? load_some(line + l * from.channel + p, count) : (vec){0};
        turn(v);
        for (int i = 0; i < count; i++) save(y, to + pixel(y, r, p + i), v[i]);
      }
    } else if (from.channel == 1) {
      for (int p = 0; p < length; p++) save(y, to + pixel(y, r, p), load_some(line + p * from.column, real));
    } else {
      for (int p = 0; p < length; p++) {
        float v[LANES] = {0};
        for (int l = 0; l < real; l++) v[l] = line[p * from.column + l * from.channel];
        save(y, to + pixel(y, r, p), *(vec_u *)v);
      }
    }
  }
}

static void export(const Op *op, int item, const External *e) {
  const Tensor X = op->x, *x = &X;
  const External to = *e;
  const int block = item % x->blocks;
  const int real = x->channels - block * LANES < LANES ? x->channels - block * LANES : LANES;
  float *y = (float *)to.data + item / x->blocks * to.image + block * LANES * to.channel;
  const int64_t from = origin(x, item);
  int rows, length;
  as_rows(&to, x->height, x->width, &rows, &length);
  for (int r = 0; r < rows; r++)
    for (int p = 0; p < length; p += LANES) {
      const int count = length - p < LANES ? length - p : LANES;
      float *line = y + r * to.row + p * to.column;
      vec v[LANES];
      for (int i = 0; i < LANES; i++) v[i] = i < count ? load(x, from + pixel(x, r, p + i)) : (vec){0};
      if (to.channel == 1) {
        for (int i = 0; i < count; i++) save_some(line + i * to.column, v[i], real);
      } else { /* the caller's results are dense: neighbouring pixels lie side by side */
        turn(v);
        for (int l = 0; l < real; l++) save_some(line + l * to.channel, v[l], count);
      }
    }
}

typedef Kernel (*Chooser)(int index);

INLINE Chooser choose_kernel(const Op *op) {
  (void)op;
#if WITH_INT8 && defined(__AVX512F__)
  if (op->x.type == QUANTUM) return op->lanes == 16 ? sp_kernel_i8_16 : sp_kernel_i8_8;
#elif WITH_INT8
  if (op->x.type == QUANTUM) return sp_kernel_i8_8;
#endif
#if defined(__AVX512F__)
  if (op->lanes == 16) return sp_kernel_f32_16;
#endif
  return sp_kernel_f32_8;
}

static void conv(const Op *op, int item) {
  const int parts = (op->groups + op->groups_per_item - 1) / op->groups_per_item;
  const int chunk = item / parts, first = item % parts * op->groups_per_item;
  const int last = first + op->groups_per_item < op->groups ? first + op->groups_per_item : op->groups;
  const Chooser kernel = choose_kernel(op);
  for (int group = first; group < last; group++)
    for (int r = op->chunk[chunk]; r < op->chunk[chunk + 1]; r++)
      kernel(op->run[3 * r])(op, group, op->run[3 * r + 1], op->run[3 * r + 2]);
}

/* Depthwise: a vector of channels meets a vector of weights, which TW pixels share. A quantized input has whole numbers
   as weights, so that the sums are exact, and scales afterwards; its zero point is in the bias. KW and SW are 0 where
   they are not known. */
INLINE void depthwise_tile(const Op *op, int item, int h, int w, const int TW, const int SW, const int KW, const int TYPE) {
  const Tensor X = op->x, Y = op->y, *x = &X, *y = &Y; /* copies: stores cannot change them */
  const float low = op->low, high = op->high;
  const int simple = op->activation == CLAMP && TYPE == y->type;
  const int step = SW ? SW : op->sw, kw = KW ? KW : op->kw, apart = KW ? 1 : op->dw;
  const int channel = item % y->blocks * LANES;
  const float *weight = (const float *)op->weight + (int64_t)channel * op->kh * kw;
  const int64_t in = origin(x, item) + (int64_t)(h * op->sh - op->ph) * x->row + (int64_t)(w * op->sw - op->pw) * LANES;
  vec sum[8];
  UNROLL for (int p = 0; p < TW; p++) sum[p] = (vec){0};
  for (int i = 0; i < op->kh; i++) {
    const int64_t at = in + (int64_t)i * op->dh * x->row;
    if (SW == 1 && KW == 3 && TYPE == QUANTUM) { /* a pixel is converted once for the three that it counts in */
      vec pixel[10];
      UNROLL for (int c = 0; c < TW + 2; c++) pixel[c] = raw(TYPE, x, at + c * LANES);
      UNROLL for (int j = 0; j < 3; j++, weight += LANES) {
        const vec k = *(const vec_u *)weight;
        UNROLL for (int p = 0; p < TW; p++) sum[p] += k * pixel[j + p];
      }
    } else {
      UNROLL for (int j = 0; j < kw; j++, weight += LANES) {
        const vec k = *(const vec_u *)weight;
        UNROLL for (int p = 0; p < TW; p++) sum[p] += k * raw(TYPE, x, at + ((int64_t)j * apart + p * step) * LANES);
      }
    }
  }
  const vec bias = *(const vec_u *)(op->bias + channel);
  vec scale = all(1.0f);
  if (TYPE == QUANTUM) scale = *(const vec_u *)(op->scale + channel);
  const int64_t out = origin(y, item) + h * y->row + (int64_t)w * LANES;
  if (simple)
    UNROLL for (int p = 0; p < TW; p++)
        save_as(TYPE, y, out + p * LANES, clamp(TYPE == FLOAT32 ? sum[p] + bias : sum[p] * scale + bias, low, high));
  else
    for (int p = 0; p < TW; p++) save(y, out + p * LANES, activated(op, sum[p] * scale + bias));
}

INLINE void depthwise_typed(const Op *op, int item, const int TYPE) {
  const int usual = op->kw == 3 && op->dw == 1;
  for (int h = 0; h < op->y.height; h++) {
    int w = 0;
    if (usual && op->sw == 1)
      for (; w + 8 <= op->y.width; w += 8) depthwise_tile(op, item, h, w, 8, 1, 3, TYPE);
    if (usual && op->sw == 1)
      for (; w + 4 <= op->y.width; w += 4) depthwise_tile(op, item, h, w, 4, 1, 3, TYPE);
    if (usual && op->sw == 2)
      for (; w + 4 <= op->y.width; w += 4) depthwise_tile(op, item, h, w, 4, 2, 3, TYPE);
    for (; w < op->y.width; w++) depthwise_tile(op, item, h, w, 1, 0, 0, TYPE);
  }
}

static void depthwise(const Op *op, int item) {
  if (op->x.type == FLOAT32) depthwise_typed(op, item, FLOAT32);
  else depthwise_typed(op, item, QUANTUM);
}

/* A window cut to the map: rows and columns from ``top`` and ``left``, in steps of the dilation. */
INLINE void pool_typed(const Op *op, int item, const int FROM, const int TO, const int LARGEST) {
  const Tensor X = op->x, Y = op->y, *x = &X, *y = &Y; /* copies: stores of bytes cannot change them */
  for (int h = 0; h < y->height; h++) {
    const int top = h * op->sh - op->ph;
    int i0 = 0, i1 = op->kh, seen_rows = 0;
    while (i0 < i1 && top + i0 * op->dh < 0) i0++;
    while (i1 > i0 && top + (i1 - 1) * op->dh >= x->height) i1--;
    for (int i = 0; i < op->kh; i++) seen_rows += top + i * op->dh < x->height + op->ph;
    for (int w = 0; w < y->width; w++) {
      const int left = w * op->sw - op->pw;
      int j0 = 0, j1 = op->kw, seen_columns = 0;
      while (j0 < j1 && left + j0 * op->dw < 0) j0++;
      while (j1 > j0 && left + (j1 - 1) * op->dw >= x->width) j1--;
      for (int j = 0; j < op->kw; j++) seen_columns += left + j * op->dw < x->width + op->pw;
      vec sum = all(LARGEST ? -INFINITY : 0.0f);
      for (int i = i0; i < i1; i++)
        for (int j = j0; j < j1; j++) {
          const vec v = load_as(FROM, x, origin(x, item) + (int64_t)(top + i * op->dh) * x->row + (int64_t)(left + j * op->dw) * LANES);
          sum = LARGEST ? choose(sum != sum, sum, larger(sum, v)) : sum + v;
        }
      const int count = op->include ? seen_rows * seen_columns : (i1 - i0) * (j1 - j0);
      if (!LARGEST) sum *= 1.0f / (float)(op->port ? op->port : count);
      save_as(TO, y, origin(y, item) + h * y->row + (int64_t)w * LANES, sum);
    }
  }
}

/* Bytes have no NaN, and the larger of two is the larger in any unit. */
static void max_pool_quanta(const Op *op, int item) {
  const Tensor X = op->x, Y = op->y, *x = &X, *y = &Y; /* copies: stores of bytes cannot change them */
  for (int h = 0; h < y->height; h++)
    for (int w = 0; w < y->width; w++) {
      quanta sum = {0};
      for (int i = 0; i < op->kh; i++)
        for (int j = 0; j < op->kw; j++) {
          const int r = h * op->sh - op->ph + i * op->dh, c = w * op->sw - op->pw + j * op->dw;
          if (r < 0 || c < 0 || r >= x->height || c >= x->width) continue;
          const quanta q = *(const quanta_u *)((const quantum *)x->data + origin(x, item) + r * x->row + (int64_t)c * LANES);
#if BYTES
          sum = (quanta)_mm_max_epu8((__m128i)sum, (__m128i)q);
#else
          const quanta more = (quanta)(q > sum);
          sum = (more & q) | (~more & sum);
#endif
        }
      *(quanta_u *)((quantum *)y->data + origin(y, item) + h * y->row + (int64_t)w * LANES) = sum;
    }
}

static void pool(const Op *op, int item) {
  if (op->kind == AVERAGE_POOL) {
    if (op->x.type == FLOAT32 && op->y.type == FLOAT32) pool_typed(op, item, FLOAT32, FLOAT32, 0);
    else if (op->x.type == QUANTUM && op->y.type == QUANTUM) pool_typed(op, item, QUANTUM, QUANTUM, 0);
    else pool_typed(op, item, op->x.type, op->y.type, 0); /* only what a convolution reads is quantized */
  } else if (op->x.type == FLOAT32) {
    pool_typed(op, item, FLOAT32, FLOAT32, 1);
  } else {
    max_pool_quanta(op, item);
  }
}

enum { CHUNK = 64 };

static void mean(const Op *op, int item) {
  const Tensor X = op->x, *x = &X;
  const int64_t from = origin(x, item), pixels = (int64_t)x->height * x->width;
  vec total = {0}, part = {0};
  int64_t at = from;
  int w = 0;
  for (int64_t done = 0; done < pixels; done += CHUNK) { /* sums of sums: one long sum would lose what is small beside it */
    const int count = pixels - done < CHUNK ? (int)(pixels - done) : CHUNK;
    vec sum[4] = {0};
    for (int i = 0; i < count; i++) {
      sum[i % 4] += load(x, at);
      at += LANES;
      if (++w == x->width) w = 0, at += x->row - (int64_t)x->width * LANES;
    }
    part += (sum[0] + sum[1]) + (sum[2] + sum[3]);
    if (done / CHUNK % CHUNK == CHUNK - 1) total += part, part = (vec){0};
  }
  save(&op->y, origin(&op->y, item), (total + part) * (1.0f / (float)pixels));
}

/* One result per pixel from x, and from z, which is a map of the same size or has one value per channel. */
INLINE void pointwise_as(const Op *op, int item, const int KIND, const int PLAIN) {
  const Tensor X = op->x, Y = op->y, Z = op->z, *x = &X, *y = &Y, *z = &Z;
  const int two = KIND == ADD || KIND == MULTIPLY;
  const int x_type = PLAIN ? FLOAT32 : x->type, y_type = PLAIN ? FLOAT32 : y->type, z_type = PLAIN ? FLOAT32 : z->type;
  const int64_t from = origin(x, item), to = origin(y, item);
  const int64_t other = two ? origin(z, z->images == 1 ? item % y->blocks : item) : 0;
  const int64_t z_row = two && z->height > 1 ? z->row : 0, z_column = two && z->width > 1 ? LANES : 0;
  vec scale = {0}, bias = {0};
  if (KIND == AFFINE) {
    scale = *(const vec_u *)(op->scale + item % y->blocks * LANES);
    bias = *(const vec_u *)(op->bias + item % y->blocks * LANES);
  }
  for (int h = 0; h < y->height; h++)
    for (int w = 0; w < y->width; w++) {
      vec v = load_as(x_type, x, from + h * x->row + (int64_t)w * LANES);
      if (KIND == AFFINE) v = v * scale + bias;
      if (KIND == ADD) v += load_as(z_type, z, other + h * z_row + w * z_column);
      if (KIND == MULTIPLY) v *= load_as(z_type, z, other + h * z_row + w * z_column);
      v = PLAIN ? clamp(v, op->low, op->high) : activated(op, v);
      save_as(y_type, y, to + h * y->row + (int64_t)w * LANES, v);
    }
}

static void pointwise(const Op *op, int item) {
  const int simple = plain(op) && ((op->kind != ADD && op->kind != MULTIPLY) || op->z.type == FLOAT32);
  switch (op->kind) {
    case ADD: simple ? pointwise_as(op, item, ADD, 1) : pointwise_as(op, item, ADD, 0); return;
    case MULTIPLY: simple ? pointwise_as(op, item, MULTIPLY, 1) : pointwise_as(op, item, MULTIPLY, 0); return;
    case AFFINE: simple ? pointwise_as(op, item, AFFINE, 1) : pointwise_as(op, item, AFFINE, 0); return;
    default: simple ? pointwise_as(op, item, UNARY, 1) : pointwise_as(op, item, UNARY, 0); return;
  }
}

/* y[..., h, w] = x[..., h / sh, w / sw]. */
static void upsample(const Op *op, int item) {
  const Tensor X = op->x, Y = op->y, *x = &X, *y = &Y; /* copies: stores of bytes cannot change them */
  for (int h = 0; h < y->height; h++) {
    const int64_t from = origin(x, item) + h / op->sh * x->row;
    for (int w = 0, c = 0; w < y->width; c++) {
      const vec v = load(x, from + (int64_t)c * LANES);
      for (int k = 0; k < op->sw; k++, w++) save(y, origin(y, item) + h * y->row + (int64_t)w * LANES, v);
    }
  }
}

/* Bilinear, without aligned corners unless ``include``; scale[0] and scale[1] are input pixels per output pixel. */
INLINE float source(const Op *op, int place, float ratio) {
  if (op->include) return (float)place * ratio;
  const float at = ((float)place + 0.5f) * ratio - 0.5f;
  return at > 0.0f ? at : 0.0f;
}

static void bilinear(const Op *op, int item) {
  const Tensor X = op->x, Y = op->y, *x = &X, *y = &Y; /* copies: stores of bytes cannot change them */
  for (int h = 0; h < y->height; h++) {
    const float down = source(op, h, op->scale[0]);
    const int r0 = (int)down < x->height - 1 ? (int)down : x->height - 1, r1 = r0 + (r0 < x->height - 1);
    const float fr = down - (float)r0;
    const int64_t top = origin(x, item) + r0 * x->row, low = origin(x, item) + r1 * x->row;
    for (int w = 0; w < y->width; w++) {
      const float across = source(op, w, op->scale[1]);
      const int c0 = (int)across < x->width - 1 ? (int)across : x->width - 1, c1 = c0 + (c0 < x->width - 1);
      const float fc = across - (float)c0;
      const vec a = load(x, top + (int64_t)c0 * LANES) * (1.0f - fc) + load(x, top + (int64_t)c1 * LANES) * fc;
      const vec b = load(x, low + (int64_t)c0 * LANES) * (1.0f - fc) + load(x, low + (int64_t)c1 * LANES) * fc;
      save(y, origin(y, item) + h * y->row + (int64_t)w * LANES, a * (1.0f - fr) + b * fr);
    }
  }
}

/* Copies x to the channels of y that begin at ``port``, which is not the border of a block. An item is one image. */
static void shift(const Op *op, int item) {
  const Tensor X = op->x, Y = op->y, *x = &X, *y = &Y; /* copies: stores of bytes cannot change them */
  for (int h = 0; h < x->height; h++)
    for (int c = 0; c < x->channels; c++) {
      const int to = c + op->port;
      const int64_t from_at = item * x->image + c / LANES * x->plane + h * x->row + c % LANES;
      const int64_t to_at = item * y->image + to / LANES * y->plane + h * y->row + to % LANES;
      for (int w = 0; w < x->width; w++) {
        if (x->type == FLOAT32) ((float *)y->data)[to_at + (int64_t)w * LANES] = ((const float *)x->data)[from_at + (int64_t)w * LANES];
        else ((quantum *)y->data)[to_at + (int64_t)w * LANES] = ((const quantum *)x->data)[from_at + (int64_t)w * LANES];
      }
    }
}

void sp_work(const Op *op, int item, const External *external) {
  switch (op->kind) {
    case IMPORT: import(op, item, external + op->port); return;
    case EXPORT: export(op, item, external + op->port); return;
    case CONV: conv(op, item); return;
    case DEPTHWISE: depthwise(op, item); return;
    case MAX_POOL:
    case AVERAGE_POOL: pool(op, item); return;
    case MEAN: mean(op, item); return;
    case UNARY:
    case AFFINE:
    case ADD:
    case MULTIPLY:
    case COPY: pointwise(op, item); return;
    case SHIFT: shift(op, item); return;
    case UPSAMPLE: upsample(op, item); return;
    case BILINEAR: bilinear(op, item); return;
  }
}
