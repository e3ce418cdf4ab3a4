/* Operations that slide a window over each channel: depthwise convolutions and pooling. */
#ifndef SMARTPRUNE_WINDOWS_H
#define SMARTPRUNE_WINDOWS_H
#include "values.h"

/* A tile of a depthwise convolution: a vector of channels is multiplied by a vector of weights, which TW pixels share. The
   weights of a quantized input are integers, so the sums are exact and are scaled afterwards; the bias contains the zero
   point. The weights of a float16 input are floats that contain its scale. KW and SW are 0 if they are not known at compile time. */
INLINE void depthwise_tile(const Op *op, int item, int h, int w, const int TW, const int SW, const int KW, const int TYPE) {
  const Tensor X = op->x, Y = op->y, *x = &X, *y = &Y; /* local copies: the compiler assumes that stores may change *op */
  const float low = op->low, high = op->high;
  const int simple = op->activation == CLAMP && TYPE == y->type;
  const int step = SW ? SW : op->sw, kw = KW ? KW : op->kw, apart = KW ? 1 : op->dw;
  const int channel = item % y->blocks * LANES;
  const float *weight = (const float *)op->weight + (int64_t)channel * op->kh * kw;
  const int64_t in = origin(x, item) + (int64_t)(h * op->sh - op->ph) * x->row + (int64_t)(w * op->sw - op->pw) * LANES;
  vfloat sum[8];
  UNROLL for (int p = 0; p < TW; p++) sum[p] = (vfloat){0};
  for (int i = 0; i < op->kh; i++) {
    const int64_t at = in + (int64_t)i * op->dh * x->row;
    if (SW == 1 && KW == 3 && TYPE != FLOAT32) { /* convert every pixel once; it contributes to three results */
      vfloat pixel[10];
      UNROLL for (int c = 0; c < TW + 2; c++) pixel[c] = raw(TYPE, x, at + c * LANES);
      UNROLL for (int j = 0; j < 3; j++, weight += LANES) {
        const vfloat k = *(const vfloat_u *)weight;
        UNROLL for (int p = 0; p < TW; p++) sum[p] += k * pixel[j + p];
      }
    } else {
      UNROLL for (int j = 0; j < kw; j++, weight += LANES) {
        const vfloat k = *(const vfloat_u *)weight;
        UNROLL for (int p = 0; p < TW; p++) sum[p] += k * raw(TYPE, x, at + ((int64_t)j * apart + p * step) * LANES);
      }
    }
  }
  const vfloat bias = *(const vfloat_u *)(op->bias + channel);
  vfloat scale = all(1.0f);
  if (TYPE == QUANTUM) scale = *(const vfloat_u *)(op->scale + channel);
  const int64_t out = origin(y, item) + h * y->row + (int64_t)w * LANES;
  if (simple && TYPE == QUANTUM) /* scale, bias and bounds are in quanta of y */
    UNROLL for (int p = 0; p < TW; p++)
        store_quanta((quantum *)y->data + out + p * LANES, (vint)(clamp(sum[p] * scale + bias, low, high) + MAGIC));
  else if (simple)
    UNROLL for (int p = 0; p < TW; p++) save_as(TYPE, y, out + p * LANES, clamp(sum[p] + bias, low, high));
  else
    for (int p = 0; p < TW; p++) save(y, out + p * LANES, activated(op, sum[p] * scale + bias));
}

#ifdef HAVE_TAPS
/* A depthwise convolution of quantized numbers where one instruction multiplies four of them. Such a word has the numbers of
   four neighbouring pixels of a channel, and `taps` has a word for each of the 16 channels. A row of the kernel takes `inner`
   words. The fourth of three taps has the weight zero, and the arena extends beyond the last pixel that is read.

   taps load_taps(q)            the words of four pixels
   taps weight_taps(weight)     words of weights
   taps later_taps(weight)      the same words for a window that starts one pixel later
   taps dot_taps(sum, x, w)     sums plus products

   This is what the tiles of an item share. Its address is never taken, so that it stays in registers. */
typedef struct {
  const quantum *in; /* the first pixel of the first window, in the margin */
  int64_t in_row, out_row, out;
  const char *weight;
  vfloat scale, bias;
} Taps;

INLINE Taps taps_of(const Op *op, int item) {
  const int channel = item % op->y.blocks * LANES;
  Taps t;
  t.in = (const quantum *)op->x.data + origin(&op->x, item) - op->ph * op->x.row - op->pw * LANES;
  t.in_row = op->x.row, t.out_row = op->y.row, t.out = origin(&op->y, item);
  t.weight = op->weight + (int64_t)channel * 4 * op->kh * op->inner;
  t.scale = *(const vfloat_u *)(op->scale + channel), t.bias = *(const vfloat_u *)(op->bias + channel);
  return t;
}

INLINE vfloat real_taps(Taps t, taps sum) { return __builtin_convertvector(sums_of_taps(sum), vfloat) * t.scale + t.bias; }

/* Rounds TW neighbouring results whose scale, bias and bounds are in quanta of y. */
INLINE void save_taps(Taps t, quantum *to, const taps *sum, const int TW, float low, float high) {
  vfloat v[4];
  UNROLL for (int p = 0; p < TW; p++) v[p] = real_taps(t, sum[p]);
#ifdef HAVE_STORE_FOUR
  store_four(to, v, TW, all(low), all(high));
#else
  UNROLL for (int p = 0; p < TW; p++) store_quanta(to + p * LANES, (vint)(clamp(v[p], low, high) + MAGIC));
#endif
}

/* TH rows of TW results, for kernels of 3x3 pixels and stride 1: four pixels serve two results of a row, and a row of pixels
   serves three rows of results. */
INLINE void taps_tile(Taps t, const quantum *in, quantum *to, float low, float high, const int TH, const int TW) {
  taps even[3], odd[3], sum[TAPS_ROWS * TAPS_COLUMNS];
  UNROLL for (int i = 0; i < 3; i++) even[i] = weight_taps(t.weight + i * LANES * 4), odd[i] = later_taps(even[i]);
  UNROLL for (int p = 0; p < TH * TW; p++) sum[p] = no_taps();
  UNROLL for (int r = 0; r < TH + 2; r++, in += t.in_row) {
    UNROLL for (int p = 0; p < TW; p += 2) {
      const taps four = load_taps(in + p * LANES);
      UNROLL for (int i = 0; i < 3; i++)
        if (r - i >= 0 && r - i < TH) {
          sum[(r - i) * TW + p] = dot_taps(sum[(r - i) * TW + p], four, even[i]);
          if (p + 1 < TW) sum[(r - i) * TW + p + 1] = dot_taps(sum[(r - i) * TW + p + 1], four, odd[i]);
        }
    }
    if (r >= 2) save_taps(t, to + (r - 2) * t.out_row, sum + (r - 2) * TW, TW, low, high);
  }
}

INLINE void taps_rows(Taps t, int h, int width, quantum *y, float low, float high, const int TH) {
  const quantum *const in = t.in + h * t.in_row;
  quantum *const to = y + t.out + h * t.out_row;
  int w = 0;
  if (TAPS_COLUMNS >= 4)
    for (; w + 4 <= width; w += 4) taps_tile(t, in + w * LANES, to + w * LANES, low, high, TH, 4);
  for (; w + 2 <= width; w += 2) taps_tile(t, in + w * LANES, to + w * LANES, low, high, TH, 2);
  if (w < width) taps_tile(t, in + w * LANES, to + w * LANES, low, high, TH, 1);
}

/* The sums of TW results of a row, for all kernels without horizontal dilation: KH rows of INNER words. */
INLINE void taps_sums(const Op *op, Taps t, const quantum *in, const int TW, const int KH, const int INNER, taps *sum) {
  const int64_t row = op->dh * t.in_row, step = op->sw * LANES;
  UNROLL for (int p = 0; p < TW; p++) sum[p] = no_taps();
  for (int i = 0; i < KH; i++, in += row)
    for (int j = 0; j < INNER; j++, t.weight += LANES * 4) {
      const taps k = weight_taps(t.weight);
      UNROLL for (int p = 0; p < TW; p++) sum[p] = dot_taps(sum[p], load_taps(in + j * 4 * LANES + p * step), k);
    }
}

/* A row of results, if scale, bias and bounds are in quanta of y. */
INLINE void taps_row(const Op *op, Taps t, const quantum *in, quantum *to, int width, float low, float high, const int KH, const int INNER) {
  const int64_t step = op->sw * LANES;
  taps sum[4];
  int w = 0;
  for (; w + 4 <= width; w += 4) {
    taps_sums(op, t, in + w * step, 4, KH, INNER, sum);
    save_taps(t, to + w * LANES, sum, 4, low, high);
  }
  for (; w < width; w++) {
    taps_sums(op, t, in + w * step, 1, KH, INNER, sum);
    save_taps(t, to + w * LANES, sum, 1, low, high);
  }
}

static void depthwise_taps(const Op *op, int item) {
  const Tensor Y = op->y, *y = &Y; /* a local copy, see depthwise_tile */
  const Taps t = taps_of(op, item);
  const float low = op->low, high = op->high;
  const int simple = op->activation == CLAMP && y->type == QUANTUM;
  quantum *const to = (quantum *)y->data;
  int h = 0;
  if (simple && op->kw == 3 && op->kh == 3 && op->sw == 1 && op->sh == 1 && op->dh == 1) {
    if (TAPS_ROWS >= 4)
      for (; h + 4 <= y->height; h += 4) taps_rows(t, h, y->width, to, low, high, 4);
    for (; h + 2 <= y->height; h += 2) taps_rows(t, h, y->width, to, low, high, 2);
    if (h < y->height) taps_rows(t, h, y->width, to, low, high, 1);
    return;
  }
  for (; h < y->height; h++) {
    const quantum *const in = t.in + h * op->sh * t.in_row;
    const int64_t out = t.out + h * t.out_row;
    if (simple && op->kh == 3 && op->inner == 1) taps_row(op, t, in, to + out, y->width, low, high, 3, 1);
    else if (simple) taps_row(op, t, in, to + out, y->width, low, high, op->kh, op->inner);
    else
      for (int w = 0; w < y->width; w++) {
        taps sum;
        taps_sums(op, t, in + w * op->sw * LANES, 1, op->kh, op->inner, &sum);
        save(y, out + w * LANES, activated(op, real_taps(t, sum)));
      }
  }
}
#endif

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
  else if (op->x.type == FLOAT16) depthwise_typed(op, item, FLOAT16);
#ifdef HAVE_TAPS
  else if (op->inner) depthwise_taps(op, item);
#endif
  else depthwise_typed(op, item, QUANTUM);
}

/* Pooling over windows that are cut to the map. A window starts at row `top` and column `left`. */
INLINE void pool_typed(const Op *op, int item, const int FROM, const int TO, const int LARGEST) {
  const Tensor X = op->x, Y = op->y, *x = &X, *y = &Y; /* local copies, see depthwise_tile */
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
      vfloat sum = all(LARGEST ? -INFINITY : 0.0f);
      for (int i = i0; i < i1; i++)
        for (int j = j0; j < j1; j++) {
          const vfloat v = load_as(FROM, x, origin(x, item) + (int64_t)(top + i * op->dh) * x->row + (int64_t)(left + j * op->dw) * LANES);
          sum = LARGEST ? choose(sum != sum, sum, at_least(sum, v)) : sum + v;
        }
      const int count = op->flag ? seen_rows * seen_columns : (i1 - i0) * (j1 - j0);
      if (!LARGEST) sum *= 1.0f / (float)(op->argument ? op->argument : count);
      save_as(TO, y, origin(y, item) + h * y->row + (int64_t)w * LANES, sum);
    }
  }
}

/* Max pooling of quantized numbers, which have no NaN and whose order does not depend on the scale. */
static void max_pool_quanta(const Op *op, int item) {
  const Tensor X = op->x, Y = op->y, *x = &X, *y = &Y; /* local copies, see depthwise_tile */
  for (int h = 0; h < y->height; h++)
    for (int w = 0; w < y->width; w++) {
      vquantum sum = (vquantum){0} + LOWEST_QUANTUM;
      for (int i = 0; i < op->kh; i++)
        for (int j = 0; j < op->kw; j++) {
          const int r = h * op->sh - op->ph + i * op->dh, c = w * op->sw - op->pw + j * op->dw;
          if (r < 0 || c < 0 || r >= x->height || c >= x->width) continue;
          const vquantum q = *(const vquantum_u *)((const quantum *)x->data + origin(x, item) + r * x->row + (int64_t)c * LANES);
          sum = largest_quanta(sum, q);
        }
      *(vquantum_u *)((quantum *)y->data + origin(y, item) + h * y->row + (int64_t)w * LANES) = sum;
    }
}

static void pool(const Op *op, int item) {
  if (op->kind == AVERAGE_POOL) {
    if (op->x.type == FLOAT32 && op->y.type == FLOAT32) pool_typed(op, item, FLOAT32, FLOAT32, 0);
    else if (op->x.type == QUANTUM && op->y.type == QUANTUM) pool_typed(op, item, QUANTUM, QUANTUM, 0);
    else pool_typed(op, item, op->x.type, op->y.type, 0); /* only inputs of convolutions are quantized, so types may differ */
  } else if (op->x.type == FLOAT32) {
    pool_typed(op, item, FLOAT32, FLOAT32, 1);
  } else if (op->x.type == FLOAT16) {
    pool_typed(op, item, FLOAT16, FLOAT16, 1);
  } else {
    max_pool_quanta(op, item);
  }
}
#endif
