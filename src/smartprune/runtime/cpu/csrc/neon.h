/* Primitives of ARM NEON: products of a tile, in vectors of 4 numbers. A group of 8 output channels is a pair of vectors.

   The kernels load a few words of weights and then go through the pixels, so that one load of a pixel serves all of these words:
   `fmla`, `sdot` and `smlal` take one number of a vector as a factor. A tile of 8 pixels holds its sums in 16 of the 32
   registers, and float32 holds 8 vectors of weights. The products of `smmla` and of float16 are described below. */
#include <arm_neon.h>
#include <string.h>

#define HAVE_FROM_HALVES
INLINE vfloat from_halves(const half *h) {
  float32x4_t part[WIDTH / 4];
  vfloat v;
  _Pragma("GCC unroll 4") for (int i = 0; i < WIDTH / 4; i++) part[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h + 4 * i)));
  memcpy(&v, part, sizeof v);
  return v;
}
#define HAVE_STORE_HALVES
INLINE void store_halves(half *h, vfloat v) {
  const float32x4_t most = vdupq_n_f32(65504.0f);
  float32x4_t part[WIDTH / 4];
  memcpy(part, &v, sizeof v);
  _Pragma("GCC unroll 4") for (int i = 0; i < WIDTH / 4; i++)
      vst1_u16(h + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(vminq_f32(most, vmaxq_f32(vnegq_f32(most), part[i])))));
}

#if defined(QUANT) && WIDTH == 8
#define HAVE_AT_LEAST
INLINE vfloat at_least(vfloat bound, vfloat v) {
  float32x4_t a[2], b[2];
  memcpy(a, &bound, sizeof a), memcpy(b, &v, sizeof b);
  for (int i = 0; i < 2; i++) a[i] = vmaxq_f32(a[i], b[i]);
  memcpy(&v, a, sizeof a);
  return v;
}
#define HAVE_AT_MOST
INLINE vfloat at_most(vfloat bound, vfloat v) {
  float32x4_t a[2], b[2];
  memcpy(a, &bound, sizeof a), memcpy(b, &v, sizeof b);
  for (int i = 0; i < 2; i++) a[i] = vminq_f32(a[i], b[i]);
  memcpy(&v, a, sizeof a);
  return v;
}
#endif

#if !defined(QUANT) && QUANTUM_BYTES == 1
#define HAVE_TAPS
#define TAPS_ROWS 2
#define TAPS_COLUMNS 2
typedef struct {
  int8x16_t part[4]; /* of 4 channels */
} taps;
#define EACH_PART _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
INLINE taps no_taps(void) {
  taps t;
  EACH_PART t.part[i] = vdupq_n_s8(0);
  return t;
}
INLINE taps weight_taps(const char *weight) {
  taps t;
  EACH_PART t.part[i] = vld1q_s8((const int8_t *)weight + 16 * i);
  return t;
}
INLINE taps later_taps(taps weight) {
  EACH_PART weight.part[i] = vreinterpretq_s8_s32(vshlq_n_s32(vreinterpretq_s32_s8(weight.part[i]), 8));
  return weight;
}
INLINE taps load_taps(const quantum *q) {
  const int8x16_t a = vld1q_s8(q), b = vld1q_s8(q + 16), c = vld1q_s8(q + 32), d = vld1q_s8(q + 48);
  const int16x8_t ab[2] = {vreinterpretq_s16_s8(vzip1q_s8(a, b)), vreinterpretq_s16_s8(vzip2q_s8(a, b))};
  const int16x8_t cd[2] = {vreinterpretq_s16_s8(vzip1q_s8(c, d)), vreinterpretq_s16_s8(vzip2q_s8(c, d))};
  taps t;
  _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) {
    t.part[2 * i] = vreinterpretq_s8_s16(vzip1q_s16(ab[i], cd[i]));
    t.part[2 * i + 1] = vreinterpretq_s8_s16(vzip2q_s16(ab[i], cd[i]));
  }
  return t;
}
INLINE taps dot_taps(taps sum, taps x, taps weight) {
  EACH_PART sum.part[i] = vreinterpretq_s8_s32(vdotq_s32(vreinterpretq_s32_s8(sum.part[i]), x.part[i], weight.part[i]));
  return sum;
}
INLINE vint sums_of_taps(taps sum) {
  vint v;
  memcpy(&v, &sum, sizeof v);
  return v;
}
#endif

#if defined(QUANT) && (!HALF || HALF_PIXELS)
#define HAVE_PRODUCTS
#define EACH_PIXEL _Pragma("GCC unroll 8") for (int r = 0; r < TH; r++) _Pragma("GCC unroll 16") for (int p = 0; p < TW; p++)
#define EVERY(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)
#define AHEAD_BYTES 1536 /* distance of the prefetch */

#if HALF
/* `fmla` multiplies one number with the weights of 8 output channels, so a pixel has its sums in one register. These are float16
   sums. After HALF_SUM products they are added to float32 sums in memory, because rounding errors of long sums are large. */
INLINE float16x8_t eight(const half *h) { return vreinterpretq_f16_u16(vld1q_u16(h)); }

/* sum += weight * x[i]. gcc 12 has no such pattern, and copies the number to a register of its own. The number must be in one of the
   first 16 registers. */
#ifdef __clang__
#define MULTIPLY_ADD(sum, weight, x, i) (sum) = vfmaq_laneq_f16(sum, weight, x, i)
#else
#define MULTIPLY_ADD(sum, weight, x, i) __asm__("fmla\t%0.8h, %1.8h, %2.h[" #i "]" : "+w"(sum) : "w"(weight), "x"(x))
#endif

/* Adds the products of COUNT input channels to the sums, four pixels at a time: their sums do not depend on each other. */
INLINE void add_channels(const int COUNT, const int TH, const int TW, const int STRIDE, const int SPLIT, float16x8_t *sum,
                         const half *const *row, int64_t at, const half *weight) {
  const int P = TH * TW;
  float16x8_t w[8];
  EVERY(i, COUNT) w[i] = eight(weight + 8 * i);
  EVERY(first, P) if (first % 4 == 0) {
    float16x8_t x[4]; /* of which COUNT numbers are used */
    EVERY(k, 4) if (first + k < P) x[k] = eight(row[(first + k) / TW] + at + (first + k) % TW * STRIDE);
#define CHANNEL(i) \
  if (i < COUNT) EVERY(k, 4) if (first + k < P) MULTIPLY_ADD(sum[i % SPLIT * P + first + k], w[i], x[k], i);
    CHANNEL(0) CHANNEL(1) CHANNEL(2) CHANNEL(3) CHANNEL(4) CHANNEL(5) CHANNEL(6) CHANNEL(7)
#undef CHANNEL
  }
}

INLINE void products(const int TH, const int TW, const int STRIDE, vfloat *out, const vfloat initial, const half *const *row,
                     const int32_t *offsets, int entries, int inner, const vfloat *weights, int once) {
  const int P = TH * TW, SPLIT = P <= 2 ? 4 : P <= 4 ? 2 : 1; /* with few pixels, several sums hide the latency of additions */
  const half *weight = (const half *)weights;
  float32x4_t total[32];
  EVERY(i, P) memcpy(total + 2 * i, &initial, sizeof initial);
  for (int e = 0; e < entries;) {
    const int last = entries - e < HALF_SUM / inner ? entries : e + HALF_SUM / inner;
    float16x8_t sum[16];
    EVERY(i, SPLIT * P) sum[i] = vdupq_n_f16(0);
    if (inner == 8)
      for (; e < last; e++, weight += 64) {
        if (once) __builtin_prefetch((const char *)weight + AHEAD_BYTES), __builtin_prefetch((const char *)weight + AHEAD_BYTES + 64);
        add_channels(8, TH, TW, STRIDE, SPLIT, sum, row, offsets[e], weight);
      }
    else if (inner == 4)
      for (; e < last; e++, weight += 32) add_channels(4, TH, TW, STRIDE, SPLIT, sum, row, offsets[e], weight);
    else
      for (; e < last; e++)
        for (int i = 0; i < inner; i++, weight += 8) add_channels(1, TH, TW, STRIDE, SPLIT, sum, row, offsets[e] + i, weight);
    EVERY(i, P) {
      for (int s = 1; s < SPLIT; s++) sum[i] = vaddq_f16(sum[i], sum[s * P + i]);
      total[2 * i] = vaddq_f32(total[2 * i], vcvt_f32_f16(vget_low_f16(sum[i])));
      total[2 * i + 1] = vaddq_f32(total[2 * i + 1], vcvt_high_f32_f16(sum[i]));
    }
  }
  memcpy(out, total, sizeof(vfloat) * P);
}

#elif !QUANT
/* Adds the products of 4 input channels to the sums. */
INLINE void four(const int TH, const int TW, const int STRIDE, const int SPLIT, float32x4_t *sum, const float *const *row, int64_t at,
                 const float *weight) {
  float32x4_t x[8];
  EACH_PIXEL x[r * TW + p] = vld1q_f32(row[r] + at + p * STRIDE);
#define CHANNEL(i)                                                                                            \
  {                                                                                                           \
    const float32x4_t w0 = vld1q_f32(weight + 8 * i), w1 = vld1q_f32(weight + 8 * i + 4);                     \
    float32x4_t *const s = sum + (SPLIT > 1 ? i % 2 * 2 * TH * TW : 0);                                       \
    EACH_PIXEL s[2 * (r * TW + p)] = vfmaq_laneq_f32(s[2 * (r * TW + p)], w0, x[r * TW + p], i);              \
    EACH_PIXEL s[2 * (r * TW + p) + 1] = vfmaq_laneq_f32(s[2 * (r * TW + p) + 1], w1, x[r * TW + p], i);      \
  }
  CHANNEL(0) CHANNEL(1) CHANNEL(2) CHANNEL(3)
}

INLINE void products(const int TH, const int TW, const int STRIDE, vfloat *out, const vfloat initial, const float *const *row,
                     const int32_t *offsets, int entries, int inner, const vfloat *weights, int once) {
  const int P = TH * TW, SPLIT = P <= 4 ? 2 : 1; /* with few pixels, two sums hide the latency of additions */
  const float *weight = (const float *)weights;
  float32x4_t sum[16], start[2];
  memcpy(start, &initial, sizeof start);
  EVERY(i, 2 * SPLIT * P) sum[i] = i < 2 * P ? start[i % 2] : vdupq_n_f32(0.0f);
  if (inner % 4 == 0)
    for (int e = 0; e < entries; e++) {
      int64_t at = offsets[e];
      for (int left = inner; left; left -= 4, at += 4, weight += 32) {
        if (once) __builtin_prefetch((const char *)weight + AHEAD_BYTES), __builtin_prefetch((const char *)weight + AHEAD_BYTES + 64);
        four(TH, TW, STRIDE, SPLIT, sum, row, at, weight);
      }
    }
  else
    for (int e = 0; e < entries; e++) {
      int64_t at = offsets[e];
      for (int left = inner; left; left--, at++, weight += 8) {
        const float32x4_t w0 = vld1q_f32(weight), w1 = vld1q_f32(weight + 4);
        EACH_PIXEL {
          const float32x4_t x = vld1q_dup_f32(row[r] + at + p * STRIDE);
          float32x4_t *const s = sum + 2 * (r * TW + p);
          s[0] = vfmaq_f32(s[0], w0, x), s[1] = vfmaq_f32(s[1], w1, x);
        }
      }
    }
  if (SPLIT > 1) EVERY(i, 2 * P) sum[i] = vaddq_f32(sum[i], sum[2 * P + i]);
  memcpy(out, sum, sizeof(vfloat) * P);
}

#elif WORD_BYTES == 8
/* `smmla` multiplies 8 input channels of two pixels with those of two output channels, and adds to four sums. So a word is 8
   bytes, and the sums of a pair of pixels lie in 4 registers, one for two output channels, until the end. The last pixel of an
   odd number of pixels is its own partner. */
INLINE void products(const int TH, const int TW, const int STRIDE, vint *out, const vint initial, const word *const *row,
                     const int32_t *offsets, int entries, int inner, const vint *weights, int once) {
  const int P = TH * TW, PAIRS = (P + 1) / 2;
  const int8_t *weight = (const int8_t *)weights;
  int32x4_t sum[16], start[2];
  memcpy(start, &initial, sizeof start);
  EVERY(i, PAIRS) EVERY(c, 2) {
    sum[4 * i + 2 * c] = vcombine_s32(vget_low_s32(start[c]), vget_low_s32(start[c]));
    sum[4 * i + 2 * c + 1] = vcombine_s32(vget_high_s32(start[c]), vget_high_s32(start[c]));
  }
  for (int e = 0; e < entries; e++)
    for (int64_t at = offsets[e], end = at + inner; at < end; at++, weight += 64) {
      int8x16_t w[4];
      if (once) __builtin_prefetch((const char *)weight + AHEAD_BYTES);
      EVERY(c, 4) w[c] = vld1q_s8(weight + 16 * c);
      EVERY(pair, PAIRS) {
        const int a = 2 * pair, b = 2 * pair + 1 < P ? 2 * pair + 1 : 2 * pair;
        const int8x8_t first = vld1_s8((const int8_t *)(row[a / TW] + at + a % TW * STRIDE));
        const int8x8_t second = vld1_s8((const int8_t *)(row[b / TW] + at + b % TW * STRIDE));
        const int8x16_t x = vcombine_s8(first, second);
        EVERY(c, 4) sum[4 * pair + c] = vmmlaq_s32(sum[4 * pair + c], x, w[c]);
      }
    }
  int32x4_t stored[16];
  EVERY(i, PAIRS) EVERY(c, 2) {
    stored[4 * i + c] = vcombine_s32(vget_low_s32(sum[4 * i + 2 * c]), vget_low_s32(sum[4 * i + 2 * c + 1]));
    stored[4 * i + 2 + c] = vcombine_s32(vget_high_s32(sum[4 * i + 2 * c]), vget_high_s32(sum[4 * i + 2 * c + 1]));
  }
  memcpy(out, stored, sizeof(vint) * P);
}

#else
#if QUANTUM_BYTES == 1
/* Adds the products of WORDS words, which are 4 input channels each. */
INLINE void words(const int WORDS, const int TH, const int TW, const int STRIDE, const int SPLIT, int32x4_t *sum,
                  const word *const *row, int64_t at, const int8_t *weight) {
  int8x16_t w[4];
  EVERY(i, 2 * WORDS) w[i] = vld1q_s8(weight + 16 * i);
  EACH_PIXEL {
    int8x8_t x;
    if (WORDS == 2) x = vld1_s8((const int8_t *)(row[r] + at + p * STRIDE));
    else x = vreinterpret_s8_s32(vld1_dup_s32((const int32_t *)(row[r] + at + p * STRIDE)));
    int32x4_t *const s = sum + 2 * (r * TW + p), *const t = s + (SPLIT > 1 ? 2 * TH * TW : 0);
    s[0] = vdotq_lane_s32(s[0], w[0], x, 0), s[1] = vdotq_lane_s32(s[1], w[1], x, 0);
    if (WORDS == 2) t[0] = vdotq_lane_s32(t[0], w[2], x, 1), t[1] = vdotq_lane_s32(t[1], w[3], x, 1);
  }
}
#else
/* Without `sdot`: 16-bit weights of neighbouring input channels are separated, and multiplied by one 16-bit number each. */
INLINE void words(const int WORDS, const int TH, const int TW, const int STRIDE, const int SPLIT, int32x4_t *sum,
                  const word *const *row, int64_t at, const int8_t *weight) {
  int16x8x2_t w[2];
  EVERY(i, WORDS) w[i] = vld2q_s16((const int16_t *)weight + 16 * i);
  EACH_PIXEL {
    int16x4_t x;
    if (WORDS == 2) x = vld1_s16((const int16_t *)(row[r] + at + p * STRIDE));
    else x = vreinterpret_s16_s32(vld1_dup_s32((const int32_t *)(row[r] + at + p * STRIDE)));
    int32x4_t *const s = sum + 2 * (r * TW + p), *const t = s + (SPLIT > 1 ? 2 * TH * TW : 0);
    s[0] = vmlal_lane_s16(s[0], vget_low_s16(w[0].val[0]), x, 0), s[1] = vmlal_high_lane_s16(s[1], w[0].val[0], x, 0);
    t[0] = vmlal_lane_s16(t[0], vget_low_s16(w[0].val[1]), x, 1), t[1] = vmlal_high_lane_s16(t[1], w[0].val[1], x, 1);
    if (WORDS == 2) {
      s[0] = vmlal_lane_s16(s[0], vget_low_s16(w[1].val[0]), x, 2), s[1] = vmlal_high_lane_s16(s[1], w[1].val[0], x, 2);
      t[0] = vmlal_lane_s16(t[0], vget_low_s16(w[1].val[1]), x, 3), t[1] = vmlal_high_lane_s16(t[1], w[1].val[1], x, 3);
    }
  }
}
#endif

INLINE void products(const int TH, const int TW, const int STRIDE, vint *out, const vint initial, const word *const *row,
                     const int32_t *offsets, int entries, int inner, const vint *weights, int once) {
  const int P = TH * TW, SPLIT = P <= 4 ? 2 : 1;
  const int8_t *weight = (const int8_t *)weights;
  int32x4_t sum[16], start[2];
  memcpy(start, &initial, sizeof start);
  EVERY(i, 2 * SPLIT * P) sum[i] = i < 2 * P ? start[i % 2] : vdupq_n_s32(0);
  if (inner % 2 == 0)
    for (int e = 0; e < entries; e++) {
      int64_t at = offsets[e];
      for (int left = inner; left; left -= 2, at += 2, weight += 64) {
        if (once) __builtin_prefetch((const char *)weight + AHEAD_BYTES);
        words(2, TH, TW, STRIDE, SPLIT, sum, row, at, weight);
      }
    }
  else
    for (int e = 0; e < entries; e++) {
      int64_t at = offsets[e];
      for (int left = inner; left; left--, at++, weight += 32) words(1, TH, TW, STRIDE, SPLIT, sum, row, at, weight);
    }
  if (SPLIT > 1) EVERY(i, 2 * P) sum[i] = vaddq_s32(sum[i], sum[2 * P + i]);
  memcpy(out, sum, sizeof(vint) * P);
}
#endif
#endif
