/* Primitives of AVX-512, for vectors of 16 numbers. Those for 8 numbers are those of AVX2, except where VNNI multiplies bytes. */
#include "avx2.h"

#if WIDTH == 16
#define HAVE_AT_LEAST
INLINE vfloat at_least(vfloat bound, vfloat v) { return (vfloat)_mm512_max_ps((__m512)bound, (__m512)v); }
#define HAVE_AT_MOST
INLINE vfloat at_most(vfloat bound, vfloat v) { return (vfloat)_mm512_min_ps((__m512)bound, (__m512)v); }

#define HAVE_LOAD_SOME
INLINE vfloat load_some(const float *from, int count) {
  return (vfloat)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
}
#define HAVE_SAVE_SOME
INLINE void save_some(float *to, vfloat v, int count) {
  _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)v);
}

#define HAVE_TRANSPOSE
INLINE void transpose(vfloat *v) {
  __m512 a[16], b[16];
  _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) {
    a[2 * i] = _mm512_unpacklo_ps((__m512)v[2 * i], (__m512)v[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_ps((__m512)v[2 * i], (__m512)v[2 * i + 1]);
  }
  _Pragma("GCC unroll 8") for (int i = 0; i < 4; i++) _Pragma("GCC unroll 8") for (int h = 0; h < 2; h++) {
    b[4 * i + 2 * h] = (__m512)_mm512_unpacklo_pd((__m512d)a[4 * i + h], (__m512d)a[4 * i + 2 + h]);
    b[4 * i + 2 * h + 1] = (__m512)_mm512_unpackhi_pd((__m512d)a[4 * i + h], (__m512d)a[4 * i + 2 + h]);
  }
  _Pragma("GCC unroll 8") for (int i = 0; i < 4; i++) { /* quarter j of b[4 q + i] is column 4 j + i of rows 4 q to 4 q + 3 */
    const __m512 lo = _mm512_shuffle_f32x4(b[i], b[4 + i], 0x44), hi = _mm512_shuffle_f32x4(b[i], b[4 + i], 0xee);
    const __m512 lo2 = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0x44), hi2 = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0xee);
    v[i] = (vfloat)_mm512_shuffle_f32x4(lo, lo2, 0x88);
    v[4 + i] = (vfloat)_mm512_shuffle_f32x4(lo, lo2, 0xdd);
    v[8 + i] = (vfloat)_mm512_shuffle_f32x4(hi, hi2, 0x88);
    v[12 + i] = (vfloat)_mm512_shuffle_f32x4(hi, hi2, 0xdd);
  }
}
#endif

#if QUANTUM_BYTES == 1
#define HAVE_DOT
#define HAVE_FROM_QUANTA
#define HAVE_STORE_QUANTA
#if WIDTH == 16
INLINE vint dot(vint sum, vint weight, int32_t x) {
  return (vint)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(x), (__m512i)weight);
}
INLINE vfloat from_quanta(const quantum *q) {
  return (vfloat)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)q)));
}
INLINE void store_quanta(quantum *q, vint bits) { _mm_storeu_si128((__m128i *)q, _mm512_cvtepi32_epi8((__m512i)bits)); }
#define HAVE_LARGEST_QUANTA
INLINE vquantum largest_quanta(vquantum a, vquantum b) { return (vquantum)_mm_max_epu8((__m128i)a, (__m128i)b); }

#define HAVE_STORE_FOUR
INLINE void store_four(quantum *q, const vfloat *v, const int COUNT, vfloat low, vfloat high) {
  const __m512i turn = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i lowest = _mm512_broadcastb_epi8(_mm512_castsi512_si128(_mm512_cvtps_epi32((__m512)at_most(high, low))));
  __m512i whole[4]; /* packing saturates: it bounds from below, also numbers beyond those of 32 bits */
  _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
      whole[i] = i < COUNT ? _mm512_cvtps_epi32((__m512)at_most(high, v[i])) : _mm512_setzero_si512();
  const __m512i ab = _mm512_packs_epi32(whole[0], whole[1]), cd = _mm512_packs_epi32(whole[2], whole[3]);
  const __m512i bytes = _mm512_permutexvar_epi32(turn, _mm512_max_epu8(_mm512_packus_epi16(ab, cd), lowest));
  if (COUNT == 4) _mm512_storeu_si512(q, bytes);
  else _mm512_mask_storeu_epi32(q, (__mmask16)((1u << 4 * COUNT) - 1), bytes);
}

#define HAVE_TAPS
#define TAPS_ROWS 4
#define TAPS_COLUMNS 4
typedef __m512i taps;
INLINE taps no_taps(void) { return _mm512_setzero_si512(); }
INLINE taps weight_taps(const char *weight) { return _mm512_loadu_si512(weight); }
INLINE taps later_taps(taps weight) { return _mm512_slli_epi32(weight, 8); }
INLINE taps load_taps(const quantum *q) {
  const __m512i turn = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(turn, _mm512_loadu_si512(q)), bytes);
}
INLINE taps dot_taps(taps sum, taps x, taps weight) { return _mm512_dpbusd_epi32(sum, x, weight); }
INLINE vint sums_of_taps(taps sum) { return (vint)sum; }
#else
INLINE vint dot(vint sum, vint weight, int32_t x) {
  return (vint)_mm256_dpbusd_epi32((__m256i)sum, _mm256_set1_epi32(x), (__m256i)weight);
}
INLINE vfloat from_quanta(const quantum *q) {
  return (vfloat)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)q)));
}
INLINE void store_quanta(quantum *q, vint bits) { _mm_storel_epi64((__m128i *)q, _mm256_cvtepi32_epi8((__m256i)bits)); }
#endif
#endif
