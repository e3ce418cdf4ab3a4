/* Convolution over the kept entries, compiled once per vector width and arithmetic.

   A kernel holds a tile of pixels in registers, with one vector of output channels per pixel, while it goes through all
   entries of a group of output channels. An entry is one kernel position and a few input channels. For each of these
   channels it has one vector of weights, which is multiplied by one broadcast activation per pixel. This broadcast is the
   only memory access per multiplication, and an absent entry costs nothing.

   A tile consists of TH segments of TW neighbouring pixels. Tables hold where a segment starts, so the kernels do not
   distinguish rows of a map, images of a batch and rows of a matrix. */
#ifndef WIDTH
#define WIDTH 16 /* output channels of a group: 16 or 8 */
#endif
#ifndef QUANT
#define QUANT 0 /* whether inputs and weights are quantized */
#endif
#ifndef HALF
#define HALF 0 /* whether inputs and weights are float16 numbers */
#endif
#include <stdint.h>

#if HALF
typedef uint16_t word;
#elif !QUANT
typedef float word;
#elif WORD_BYTES == 8
typedef int64_t word __attribute__((may_alias, aligned(1)));
#else
typedef int32_t word __attribute__((may_alias, aligned(1)));
#endif

#include "vectors.h"

#include <string.h>

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
#if QUANT
#define KERNEL_OF JOIN(sp_kernel_i8_, WIDTH)
#elif HALF
#define KERNEL_OF JOIN(sp_kernel_f16_, WIDTH)
#else
#define KERNEL_OF JOIN(sp_kernel_f32_, WIDTH)
#endif
#define UNROLL _Pragma("GCC unroll 16")
#ifdef __clang__
#define SEPARATE __attribute__((noinline))
#else
#define SEPARATE __attribute__((noinline, noclone))
#endif
#define AHEAD 48 /* distance of the prefetch, in vectors of weights */

#if QUANT
typedef quantum element;
typedef vint accumulator;
#define PIXEL ((int)(LANES * sizeof(quantum) / WORD_BYTES)) /* words from one pixel to the next */
#define USUAL (8 * (int)sizeof(quantum) / WORD_BYTES)       /* words of an entry of 8 input channels */
#else
typedef word element;
typedef vfloat accumulator;
#define PIXEL LANES
#define USUAL 8
#endif

#if QUANT
#if !defined(HAVE_DOT) && !defined(HAVE_PRODUCTS)
INLINE vint dot(vint sum, vint weight, int32_t x) {
#if QUANTUM_BYTES == 1
#error "an instruction set whose quantized numbers take one byte needs its own dot"
#endif
  return sum + ((weight << 16) >> 16) * (x & 0xffff) + (weight >> 16) * (int32_t)((uint32_t)x >> 16);
}
#endif
#ifndef HAVE_FROM_QUANTA
INLINE vfloat from_quanta(const quantum *q) {
  return __builtin_convertvector(__builtin_convertvector(*(const vquantum_u *)q, vint), vfloat);
}
#endif
#ifndef HAVE_STORE_QUANTA
INLINE void store_quanta(quantum *q, vint bits) { *(vquantum_u *)q = __builtin_convertvector(bits & 0x1ff, vquantum); }
#endif
#endif

#if HALF
#include "half.h"
#endif

#ifndef HAVE_PRODUCTS
/* Adds a vector of weights times a broadcast word to the sum. */
INLINE accumulator multiply_add(accumulator sum, accumulator weight, word x) {
#if QUANT
  return dot(sum, weight, x);
#else
  return sum + weight * x;
#endif
}
#endif

#if QUANT
INLINE vfloat load_quanta(const char *data, int64_t at) { return from_quanta((const quantum *)data + at); }

/* Rounds numbers to nearest, ties to even: adding 1.5 * 2^23 leaves the integer in the low bits. */
INLINE void save_quanta(char *data, int64_t at, vfloat v) { store_quanta((quantum *)data + at, (vint)(v + 12582912.0f)); }

/* Stores the results of a tile in quanta of y. If the activation is a clamp and nothing is added after it, the bias contains
   the zero points of y and z, and the bounds of the clamp lie within those of a quantum (see quantize.py). */
static SEPARATE void finish_quanta(int TH, int TW, const vint *sum, const Op *op, int group, int segment) {
  const Tensor y = op->y, z = op->z; /* local copies: the compiler assumes that byte stores may change *op */
  const int64_t channel = (int64_t)group * WIDTH;
  const int64_t y_group = channel / LANES * y.plane + channel % LANES;
  const int64_t z_group = channel / LANES * z.plane + channel % LANES;
  const vfloat scale = *(const vfloat_u *)(op->scale + channel), bias = *(const vfloat_u *)(op->bias + channel);
  const vfloat low = all(op->low), high = all(op->high);
  const float ratio = z.scale / y.scale;
  for (int r = 0; r < TH; r++, segment++) {
    int64_t y_at = y_group + op->y_start[segment];
    int64_t z_at = op->addition ? z_group + op->z_start[segment] : 0;
#define NEXT p++, sum++, y_at += LANES, z_at += LANES
#define RESULT (__builtin_convertvector(*sum, vfloat) * scale + bias)
#define SAVE(v) save_quanta(y.data, y_at, v)
#define BOUNDED(v) at_most(high, at_least(low, v))
    int p = 0;
    if (op->activation == CLAMP && y.type == QUANTUM && op->addition == ADD_NONE) {
      for (; p < TW; NEXT) SAVE(BOUNDED(RESULT));
    } else if (op->activation == CLAMP && y.type == QUANTUM && op->addition == ADD_BEFORE) {
      for (; p < TW; NEXT) SAVE(BOUNDED(RESULT + load_quanta(z.data, z_at) * ratio));
    } else {
      for (; p < TW; NEXT) {
        vfloat v = RESULT;
        if (op->activation != CLAMP) {
          float values[WIDTH];
          memcpy(values, &v, sizeof v);
          sp_finish(op, values, 1, WIDTH, z_at);
          memcpy(&v, values, sizeof v);
        } else {
          if (op->addition == ADD_BEFORE) v += load_quanta(z.data, z_at) * ratio;
          v = BOUNDED(v);
          if (op->addition == ADD_AFTER) v += (load_quanta(z.data, z_at) - z.zero) * ratio;
        }
        if (y.type == QUANTUM) SAVE(at_most(all(HIGHEST_QUANTUM), at_least(all(LOWEST_QUANTUM), v + y.zero)));
        else *(vfloat_u *)((float *)y.data + y_at) = v;
      }
    }
  }
}
#endif

#if QUANT && defined(HAVE_STORE_FOUR)
/* The most frequent case of finish_quanta, in registers. */
INLINE void finish_fours(const int TH, const int TW, const vint *sum, const Op *op, int group, int segment, const int ADDITION) {
  const int64_t channel = (int64_t)group * WIDTH; /* a group is a block */
  const quantum *const z = (const quantum *)op->z.data + group * op->z.plane;
  quantum *const y = (quantum *)op->y.data + group * op->y.plane;
  const vfloat scale = *(const vfloat_u *)(op->scale + channel), bias = *(const vfloat_u *)(op->bias + channel);
  const vfloat low = all(op->low), high = all(op->high), ratio = all(ADDITION ? op->z.scale / op->y.scale : 0.0f);
  UNROLL for (int r = 0; r < TH; r++) {
    const quantum *const from = ADDITION ? z + op->z_start[segment + r] : 0;
    quantum *const to = y + op->y_start[segment + r];
    UNROLL for (int p = 0; p < TW; p += 4) {
      const int count = TW - p < 4 ? TW - p : 4;
      vfloat v[4];
      UNROLL for (int i = 0; i < count; i++) {
        v[i] = __builtin_convertvector(sum[r * TW + p + i], vfloat) * scale + bias;
        if (ADDITION) v[i] += from_quanta(from + (p + i) * LANES) * ratio;
      }
      store_four(to + p * LANES, v, count, low, high);
    }
  }
}
#endif

/* Applies bias, activation and addition to the sums of a tile, and stores the results. */
#if QUANT
INLINE void finish(const int TH, const int TW, const accumulator *sum, const Op *op, int group, int segment) {
#ifdef HAVE_STORE_FOUR
  if (TW >= 4 && op->activation == CLAMP && op->y.type == QUANTUM && op->addition != ADD_AFTER) {
    if (op->addition == ADD_NONE) finish_fours(TH, TW, sum, op, group, segment, 0);
    else finish_fours(TH, TW, sum, op, group, segment, 1);
    return;
  }
#endif
  accumulator stored[16]; /* in memory: a loop over pixels is shorter code, and it runs once per tile */
  UNROLL for (int i = 0; i < TH * TW; i++) stored[i] = sum[i];
  finish_quanta(TH, TW, stored, op, group, segment);
}
#elif !HALF
INLINE void finish(const int TH, const int TW, accumulator *v, const Op *op, int group, int segment) {
  const int64_t channel = (int64_t)group * WIDTH;
  const int64_t y_group = channel / LANES * op->y.plane + channel % LANES;
  const int64_t z_group = channel / LANES * op->z.plane + channel % LANES;
#define EACH UNROLL for (int r = 0; r < TH; r++) UNROLL for (int p = 0; p < TW; p++)
#define RESIDUAL(r, p) (*(const vfloat_u *)((const float *)op->z.data + z_group + op->z_start[segment + r] + p * LANES))
  if (op->activation != CLAMP) {
    float values[16 * WIDTH] __attribute__((aligned(64)));
    UNROLL for (int i = 0; i < TH * TW; i++) memcpy(values + i * WIDTH, &v[i], sizeof(vfloat));
    for (int r = 0; r < TH; r++)
      sp_finish(op, values + r * TW * WIDTH, TW, WIDTH, op->addition ? z_group + op->z_start[segment + r] : 0);
    UNROLL for (int i = 0; i < TH * TW; i++) memcpy(&v[i], values + i * WIDTH, sizeof(vfloat));
  } else {
    if (op->addition == ADD_BEFORE) EACH v[r * TW + p] += RESIDUAL(r, p);
    const vfloat low = all(op->low), high = all(op->high);
    UNROLL for (int i = 0; i < TH * TW; i++) v[i] = at_most(high, at_least(low, v[i]));
    if (op->addition == ADD_AFTER) EACH v[r * TW + p] += RESIDUAL(r, p);
  }
  float *const y = (float *)op->y.data + y_group;
  EACH *(vfloat_u *)(y + op->y_start[segment + r] + p * LANES) = v[r * TW + p];
}
#endif

/* The sums of a tile: `initial` plus the products of all entries of a group. Pixel p of row r of the tile starts at
   row[r] + p * STRIDE, and an entry reads it from the entry's offset on. `once`: no other tile reads these weights. */
#ifndef HAVE_PRODUCTS
INLINE void products(const int TH, const int TW, const int STRIDE, accumulator *sum, const accumulator initial, const word *const *row,
                     const int32_t *offsets, int entries, int inner, const accumulator *weight, int once) {
  const int P = TH * TW;
  const int SPLIT = P <= 2 ? 4 : P <= 4 ? 2 : 1; /* with few pixels, several sums hide the latency of additions */
  UNROLL for (int i = 0; i < SPLIT * P; i++) sum[i] = i < P ? initial : (accumulator){0};
#define STEP(N)                                                                                               \
  UNROLL for (int i = 0; i < N; i++) {                                                                        \
    const accumulator w = weight[i];                                                                          \
    UNROLL for (int r = 0; r < TH; r++) UNROLL for (int p = 0; p < TW; p++) sum[i % SPLIT * P + r * TW + p] = \
        multiply_add(sum[i % SPLIT * P + r * TW + p], w, row[r][at + i + p * STRIDE]);                        \
  }                                                                                                           \
  weight += N, at += N;
  if (inner == USUAL)
    for (int e = 0; e < entries; e++) {
      int64_t at = offsets[e];
      if (once) UNROLL for (int i = 0; i < USUAL; i++) __builtin_prefetch(weight + AHEAD + i);
      STEP(USUAL)
    }
  else if (!QUANT && inner % 3 == 0) /* images of three channels */
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
}
#endif

/* The results of a group without entries, which are the same for all pixels: the first one is computed and copied. */
static SEPARATE void fill(int TH, int TW, const accumulator *initial, const Op *op, int group, int segment, int count) {
  const Tensor y = op->y; /* a local copy, see finish_quanta */
  const int64_t channel = (int64_t)group * WIDTH, y_group = channel / LANES * y.plane + channel % LANES;
  const int64_t first = y_group + op->y_start[segment];
  accumulator sum[16] = {*initial};
  finish(1, 1, sum, op, group, segment);
  for (int s = segment; s < segment + count * TH; s++) {
    const int64_t at = y_group + op->y_start[s];
    if (y.type == FLOAT32) {
      const vfloat v = *(const vfloat_u *)((const float *)y.data + first);
      for (int p = 0; p < TW; p++) *(vfloat_u *)((float *)y.data + at + p * LANES) = v;
    } else if (y.type == FLOAT16) {
      half v[WIDTH];
      memcpy(v, (const half *)y.data + first, sizeof v);
      for (int p = 0; p < TW; p++) memcpy((half *)y.data + at + p * LANES, v, sizeof v);
    } else {
      const vquantum v = *(const vquantum_u *)((const quantum *)y.data + first);
      for (int p = 0; p < TW; p++) *(vquantum_u *)((quantum *)y.data + at + p * LANES) = v;
    }
  }
}

/* Computes `count` tiles of TH segments of TW pixels. STRIDE: words from one pixel of a segment to the next in the input. */
INLINE void tiles(const int TH, const int TW, const int STRIDE, const Op *op, int group, int segment, int count) {
  const int first = op->group_start[group], entries = op->group_start[group + 1] - first;
  const int inner = op->inner, once = count == 1; /* weights that are used once are prefetched: they are not in the cache */
  const int32_t *const offsets = op->entry_offset + first;
  const accumulator *const weights = (const accumulator *)(op->weight + (int64_t)first * inner * ((int)sizeof(word) * WIDTH));
#if QUANT
  const accumulator initial = *(const vint_u *)(op->initial_sum + (int64_t)group * WIDTH);
#elif HALF
  const accumulator initial = {0}; /* the bias is added to scaled sums */
#else
  const accumulator initial = *(const vfloat_u *)(op->bias + (int64_t)group * WIDTH);
#endif
  if (!entries && !op->addition) {
    fill(TH, TW, &initial, op, group, segment, count);
    return;
  }
  for (int t = 0; t < count; t++, segment += TH) {
    accumulator sum[16]; /* a fixed size: the compiler keeps arrays of variable size in memory */
    const word *row[8];
    UNROLL for (int r = 0; r < TH; r++) row[r] = (const word *)((const element *)op->x.data + op->x_start[segment + r]);
    products(TH, TW, STRIDE, sum, initial, row, offsets, entries, inner, weights, once);
    finish(TH, TW, sum, op, group, segment);
  }
}

/* The tiles that fit in the registers: (TH, TW, step in pixels), with the index ((step - 1) * 4 + log2(TH)) * 32 + TW. */
#define TILES_6(F)                                                                                            \
  F(1, 1, 1) F(1, 2, 1) F(1, 3, 1) F(1, 4, 1) F(1, 5, 1) F(1, 6, 1) F(2, 1, 1) F(2, 2, 1) F(2, 3, 1) F(4, 1, 1) \
  F(1, 1, 2) F(1, 2, 2) F(1, 3, 2) F(1, 4, 2) F(1, 5, 2) F(1, 6, 2) F(2, 1, 2) F(2, 2, 2) F(2, 3, 2) F(4, 1, 2)
#define TILES_8(F)                                                                                            \
  F(1, 7, 1) F(1, 8, 1) F(2, 4, 1) F(4, 2, 1) F(8, 1, 1) F(1, 7, 2) F(1, 8, 2) F(2, 4, 2) F(4, 2, 2) F(8, 1, 2)
#define TILES_12(F)                                                                                           \
  F(1, 9, 1) F(1, 10, 1) F(1, 11, 1) F(1, 12, 1) F(2, 5, 1) F(2, 6, 1) F(4, 3, 1) F(2, 5, 2) F(2, 6, 2) F(4, 3, 2)
#define TILES_16(F)                                                                                           \
  F(1, 13, 1) F(1, 14, 1) F(1, 15, 1) F(1, 16, 1) F(2, 7, 1) F(2, 8, 1) F(4, 4, 1) F(8, 2, 1) F(2, 7, 2) F(2, 8, 2) \
  F(4, 4, 2) F(8, 2, 2)
#ifndef TILES
#if MOST_PIXELS >= 16 || (HALF && HALF_PIXELS >= 16)
#define TILES(F) TILES_6(F) TILES_8(F) TILES_12(F) TILES_16(F)
#elif MOST_PIXELS >= 12
#define TILES(F) TILES_6(F) TILES_8(F) TILES_12(F)
#elif MOST_PIXELS >= 8
#define TILES(F) TILES_6(F) TILES_8(F)
#else
#define TILES(F) TILES_6(F)
#endif
#endif

#define NAME(TH, TW, SW) JOIN(KERNEL_OF, _##TH##_##TW##_##SW)
#define DEFINE(TH, TW, SW)                                                                                    \
  static void NAME(TH, TW, SW)(const Op *op, int group, int segment, int count) {                             \
    tiles(TH, TW, (SW)*PIXEL, op, group, segment, count);                                                     \
  }
#define CASE(TH, TW, SW)                                                                                      \
  case (((SW)-1) * 4 + ((TH) == 8 ? 3 : (TH) / 2)) * 32 + (TW): return NAME(TH, TW, SW);

TILES(DEFINE)

LOCAL Kernel KERNEL_OF(int index) {
  switch (index) {
    TILES(CASE)
  }
  return 0;
}
