/* Primitives of AVX2, for vectors of 8 numbers. */
#include <immintrin.h>

#if WIDTH == 8
#define HAVE_AT_LEAST
INLINE vfloat at_least(vfloat bound, vfloat v) { return (vfloat)_mm256_max_ps((__m256)bound, (__m256)v); }
#define HAVE_AT_MOST
INLINE vfloat at_most(vfloat bound, vfloat v) { return (vfloat)_mm256_min_ps((__m256)bound, (__m256)v); }

#if QUANTUM_BYTES == 2
#define HAVE_DOT
INLINE vint dot(vint sum, vint weight, int32_t x) { return sum + (vint)_mm256_madd_epi16(_mm256_set1_epi32(x), (__m256i)weight); }
#define HAVE_FROM_QUANTA
INLINE vfloat from_quanta(const quantum *q) {
  return (vfloat)_mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)q)));
}
#define HAVE_STORE_QUANTA
INLINE void store_quanta(quantum *q, vint bits) {
  const __m256i low = (__m256i)(bits & 0x1ff);
  _mm_storeu_si128((__m128i *)q, _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
}
#endif
#endif
