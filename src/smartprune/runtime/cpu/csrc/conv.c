/* Convolution over the entries that were kept: compiled once per vector length and arithmetic.

   A kernel holds a tile of pixels in registers, one vector of output channels per pixel, through all entries of a
   group of output channels. An entry is a kernel position and a few input channels; for each of them it has one
   vector of weights, which meets one broadcast activation per pixel. So the only memory traffic per multiplication is
   that broadcast, and an absent entry costs nothing at all.

   A tile is TH stretches of TW neighbouring pixels. Where a stretch begins is looked up, so rows, images of a batch
   and rows of a matrix are all the same. */
#include "runtime.h"

#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef WIDTH
#define WIDTH 16 /* output channels of a group: 16 or 8 */
#endif
#ifndef QUANT
#define QUANT 0
#endif

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
#if QUANT
#define KERNEL_OF JOIN(sp_kernel_i8_, WIDTH)
#else
#define KERNEL_OF JOIN(sp_kernel_f32_, WIDTH)
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define AHEAD 48 /* vectors of weights between what is asked for and what is used */

typedef float vfloat __attribute__((vector_size(4 * WIDTH)));
typedef float vfloat_u __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t vint __attribute__((vector_size(4 * WIDTH)));
typedef int32_t vint_u __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

#if QUANT
typedef quantum element;
typedef vint accumulator;
typedef int32_t word __attribute__((may_alias, aligned(1)));
typedef quantum vquantum __attribute__((vector_size(WIDTH * sizeof(quantum))));
typedef quantum vquantum_u __attribute__((vector_size(WIDTH * sizeof(quantum)), aligned(1), may_alias));
#define PIXEL ((int)(LANES * sizeof(quantum) / 4)) /* words from one pixel to the next */
#define USUAL (8 * (int)sizeof(quantum) / 4)       /* words of an entry of 8 input channels */
#else
typedef float element;
typedef vfloat accumulator;
typedef float word;
#define PIXEL LANES
#define USUAL 8
#endif

/* One vector of weights times one broadcast word, added to the sum. */
INLINE accumulator dot(accumulator sum, accumulator weight, word x) {
#if !QUANT
  return sum + weight * x;
#elif BYTES && WIDTH == 16
  return (vint)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(x), (__m512i)weight);
#elif BYTES
  return (vint)_mm256_dpbusd_epi32((__m256i)sum, _mm256_set1_epi32(x), (__m256i)weight);
#elif defined(__AVX2__) && WIDTH == 8
  return sum + (vint)_mm256_madd_epi16(_mm256_set1_epi32(x), (__m256i)weight);
#else
  return sum + ((weight << 16) >> 16) * (x & 0xffff) + (weight >> 16) * (int32_t)((uint32_t)x >> 16);
#endif
}

/* The larger of the two; NaN in v stays NaN, as torch has it. */
INLINE vfloat at_least(vfloat bound, vfloat v) {
#if defined(__AVX512F__) && WIDTH == 16
  return (vfloat)_mm512_max_ps((__m512)bound, (__m512)v);
#elif defined(__AVX2__) && WIDTH == 8
  return (vfloat)_mm256_max_ps((__m256)bound, (__m256)v);
#else
  const vint m = bound > v;
  return (vfloat)((m & (vint)bound) | (~m & (vint)v));
#endif
}

INLINE vfloat at_most(vfloat bound, vfloat v) {
#if defined(__AVX512F__) && WIDTH == 16
  return (vfloat)_mm512_min_ps((__m512)bound, (__m512)v);
#elif defined(__AVX2__) && WIDTH == 8
  return (vfloat)_mm256_min_ps((__m256)bound, (__m256)v);
#else
  const vint m = bound < v;
  return (vfloat)((m & (vint)bound) | (~m & (vint)v));
#endif
}

INLINE vfloat all(float value) { return (vfloat){0} + value; }

#if QUANT
/* These two are spelled out: compilers take a generic conversion of vectors apart, number by number. */
INLINE vfloat from_quanta(const char *data, int64_t at) {
  const quantum *q = (const quantum *)data + at;
#if BYTES && WIDTH == 16
  return (vfloat)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)q)));
#elif BYTES
  return (vfloat)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)q)));
#elif defined(__AVX2__) && WIDTH == 8
  return (vfloat)_mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)q)));
#else
  return __builtin_convertvector(__builtin_convertvector(*(const vquantum_u *)q, vint), vfloat);
#endif
}

/* Rounds numbers from 0 to 255 to nearest, ties to even, by adding 1.5 * 2^23: the integer is then in the low bits. */
INLINE void to_quanta(char *data, int64_t at, vfloat v) {
  const vint bits = (vint)(v + 12582912.0f);
  quantum *q = (quantum *)data + at;
#if BYTES && WIDTH == 16
  _mm_storeu_si128((__m128i *)q, _mm512_cvtepi32_epi8((__m512i)bits));
#elif BYTES
  _mm_storel_epi64((__m128i *)q, _mm256_cvtepi32_epi8((__m256i)bits));
#elif defined(__AVX2__) && WIDTH == 8
  const __m256i small = (__m256i)(bits & 0x1ff);
  _mm_storeu_si128((__m128i *)q, _mm_packus_epi32(_mm256_castsi256_si128(small), _mm256_extracti128_si256(small, 1)));
#else
  *(vquantum_u *)q = __builtin_convertvector(bits & 0x1ff, vquantum);
#endif
}

/* Results of a tile in quanta of y. The bias has the zero points of y and of z in it, and the clamp ends at 0 and 255,
   unless something is added after the clamp or the activation is another one: see quantize.py. */
static __attribute__((noinline, noclone)) void finish_quanta(int TH, int TW, const vint *sum, const Op *op, int group, int segment) {
  const Tensor y = op->y, z = op->z; /* copies: a store of bytes might change the originals, as the compiler sees it */
  const int64_t channel = (int64_t)group * WIDTH;
  const int64_t y_group = channel / LANES * y.plane + channel % LANES;
  const int64_t z_group = channel / LANES * z.plane + channel % LANES;
  const vfloat scale = *(const vfloat_u *)(op->scale + channel), bias = *(const vfloat_u *)(op->bias + channel);
  const vfloat low = all(op->low), high = all(op->high);
  const float ratio = z.scale / y.scale;
  for (int r = 0; r < TH; r++, segment++) {
    int64_t out = y_group + op->out[segment];
    int64_t side = op->adding ? z_group + op->side[segment] : 0;
#define NEXT p++, sum++, out += LANES, side += LANES
#define RESULT (__builtin_convertvector(*sum, vfloat) * scale + bias)
#define QUANTA(v) to_quanta(y.data, out, v)
    if (op->activation == CLAMP && y.type == QUANTUM && op->adding == ADD_NONE)
      for (int p = 0; p < TW; NEXT) QUANTA(at_most(high, at_least(low, RESULT)));
    else if (op->activation == CLAMP && y.type == QUANTUM && op->adding == ADD_BEFORE)
      for (int p = 0; p < TW; NEXT) QUANTA(at_most(high, at_least(low, RESULT + from_quanta(z.data, side) * ratio)));
    else
      for (int p = 0; p < TW; NEXT) {
        vfloat v = RESULT;
        if (op->activation != CLAMP) {
          float values[WIDTH];
          memcpy(values, &v, sizeof v);
          sp_finish(op, values, 1, WIDTH, side);
          memcpy(&v, values, sizeof v);
        } else {
          if (op->adding == ADD_BEFORE) v += from_quanta(z.data, side) * ratio;
          v = at_most(high, at_least(low, v));
          if (op->adding == ADD_AFTER) v += (from_quanta(z.data, side) - z.zero) * ratio;
        }
        if (y.type == QUANTUM) QUANTA(at_most(all(255.0f), at_least(all(0.0f), v + y.zero)));
        else *(vfloat_u *)((float *)y.data + out) = v;
      }
  }
}
#endif

/* Turns sums into results and stores them. */
#if QUANT
INLINE void finish(const int TH, const int TW, const accumulator *sum, const Op *op, int group, int segment) {
  accumulator held[16]; /* in memory: a loop over the pixels is short code, and this is done once per tile */
  UNROLL for (int i = 0; i < TH * TW; i++) held[i] = sum[i];
  finish_quanta(TH, TW, held, op, group, segment);
}
#else
INLINE void finish(const int TH, const int TW, accumulator *v, const Op *op, int group, int segment) {
  const int64_t channel = (int64_t)group * WIDTH;
  const int64_t y_group = channel / LANES * op->y.plane + channel % LANES;
  const int64_t z_group = channel / LANES * op->z.plane + channel % LANES;
#define EACH UNROLL for (int r = 0; r < TH; r++) UNROLL for (int p = 0; p < TW; p++)
#define SIDE(r, p) (*(const vfloat_u *)((const float *)op->z.data + z_group + op->side[segment + r] + p * LANES))
  if (op->activation != CLAMP) {
    float values[16 * WIDTH] __attribute__((aligned(64)));
    UNROLL for (int i = 0; i < TH * TW; i++) memcpy(values + i * WIDTH, &v[i], sizeof(vfloat));
    for (int r = 0; r < TH; r++)
      sp_finish(op, values + r * TW * WIDTH, TW, WIDTH, op->adding ? z_group + op->side[segment + r] : 0);
    UNROLL for (int i = 0; i < TH * TW; i++) memcpy(&v[i], values + i * WIDTH, sizeof(vfloat));
  } else {
    if (op->adding == ADD_BEFORE) EACH v[r * TW + p] += SIDE(r, p);
    const vfloat low = all(op->low), high = all(op->high);
    UNROLL for (int i = 0; i < TH * TW; i++) v[i] = at_most(high, at_least(low, v[i]));
    if (op->adding == ADD_AFTER) EACH v[r * TW + p] += SIDE(r, p);
  }
  float *const y = (float *)op->y.data + y_group;
  EACH *(vfloat_u *)(y + op->out[segment + r] + p * LANES) = v[r * TW + p];
}
#endif

/* STRIDE: words from one pixel of a stretch to the next in the input. */
INLINE void tiles(const int TH, const int TW, const int STRIDE, const Op *op, int group, int segment, int count) {
  const int P = TH * TW;
  const int SPLIT = P <= 2 ? 4 : P <= 4 ? 2 : 1; /* few pixels: more sums, to hide the latency of an addition */
  const int first = op->start[group], entries = op->start[group + 1] - first;
  const int inner = op->inner, once = count == 1; /* weights that are read once come from far away */
  const int32_t *const offsets = op->offset + first;
  const accumulator *const weights = (const accumulator *)op->weight + (int64_t)first * inner;
  for (int t = 0; t < count; t++, segment += TH) {
    accumulator sum[16]; /* of fixed size, or the compiler would keep it in memory */
#if QUANT
    const accumulator begin = *(const vint_u *)(op->begin + (int64_t)group * WIDTH);
#else
    const accumulator begin = *(const vfloat_u *)(op->bias + (int64_t)group * WIDTH);
#endif
    UNROLL for (int i = 0; i < SPLIT * P; i++) sum[i] = i < P ? begin : (accumulator){0};
    const word *row[8];
    UNROLL for (int r = 0; r < TH; r++) row[r] = (const word *)((const element *)op->x.data + op->in[segment + r]);
    const accumulator *weight = weights;
#define STEP(N)                                                                                               \
  UNROLL for (int i = 0; i < N; i++) {                                                                        \
    const accumulator w = weight[i];                                                                          \
    UNROLL for (int r = 0; r < TH; r++) UNROLL for (int p = 0; p < TW; p++) sum[i % SPLIT * P + r * TW + p] = \
        dot(sum[i % SPLIT * P + r * TW + p], w, row[r][at + i + p * STRIDE]);                                 \
  }                                                                                                           \
  weight += N, at += N;
    if (inner == USUAL)
      for (int e = 0; e < entries; e++) {
        int64_t at = offsets[e];
        if (once) UNROLL for (int i = 0; i < USUAL; i++) __builtin_prefetch(weight + AHEAD + i);
        STEP(USUAL)
      }
    else if (inner % 3 == 0) /* an image of three channels */
      for (int e = 0; e < entries; e++) {
        int64_t at = offsets[e];
        for (int left = inner; left; left -= 3) {
          STEP(3)
        }
      }
    else
      for (int e = 0; e < entries; e++) {
        int64_t at = offsets[e];
        for (int left = inner; left; left--) {
          STEP(1)
        }
      }
    UNROLL for (int s = 1; s < SPLIT; s++) UNROLL for (int i = 0; i < P; i++) sum[i] += sum[s * P + i];
    finish(TH, TW, sum, op, group, segment);
  }
}

/* The tiles that fit in the registers: (TH, TW, step in pixels), numbered ((step - 1) * 4 + log2(TH)) * 32 + TW. */
#if defined(__AVX512F__)
#define MOST 16
#elif defined(__AVX2__)
#define MOST 12
#else
#define MOST 6
#endif

#define TILES(F)                                                                                              \
  F(1, 1, 1) F(1, 2, 1) F(1, 3, 1) F(1, 4, 1) F(1, 5, 1) F(1, 6, 1) F(2, 1, 1) F(2, 2, 1) F(2, 3, 1) F(4, 1, 1) \
  F(1, 1, 2) F(1, 2, 2) F(1, 3, 2) F(1, 4, 2) F(1, 5, 2) F(1, 6, 2) F(2, 1, 2) F(2, 2, 2) F(2, 3, 2) F(4, 1, 2)
#define TILES_12(F)                                                                                           \
  F(1, 7, 1) F(1, 8, 1) F(1, 9, 1) F(1, 10, 1) F(1, 11, 1) F(1, 12, 1) F(2, 4, 1) F(2, 5, 1) F(2, 6, 1)       \
  F(4, 2, 1) F(4, 3, 1) F(8, 1, 1) F(1, 7, 2) F(1, 8, 2) F(2, 4, 2) F(2, 5, 2) F(2, 6, 2) F(4, 2, 2) F(4, 3, 2) F(8, 1, 2)
#define TILES_16(F)                                                                                           \
  F(1, 13, 1) F(1, 14, 1) F(1, 15, 1) F(1, 16, 1) F(2, 7, 1) F(2, 8, 1) F(4, 4, 1) F(8, 2, 1) F(2, 7, 2) F(2, 8, 2) \
  F(4, 4, 2) F(8, 2, 2)

#define DEFINE(TH, TW, SW)                                                                                    \
  static void tile_##TH##_##TW##_##SW(const Op *op, int group, int segment, int count) {                      \
    tiles(TH, TW, (SW)*PIXEL, op, group, segment, count);                                                     \
  }
#define CASE(TH, TW, SW)                                                                                      \
  case (((SW)-1) * 4 + ((TH) == 8 ? 3 : (TH) / 2)) * 32 + (TW): return tile_##TH##_##TW##_##SW;

TILES(DEFINE)
#if MOST >= 12
TILES_12(DEFINE)
#endif
#if MOST >= 16
TILES_16(DEFINE)
#endif

Kernel KERNEL_OF(int index) {
  switch (index) {
    TILES(CASE)
#if MOST >= 12
    TILES_12(CASE)
#endif
#if MOST >= 16
    TILES_16(CASE)
#endif
  }
  return 0;
}
