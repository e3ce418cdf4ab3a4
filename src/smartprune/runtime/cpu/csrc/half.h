/* Convolutions of float16 numbers, for conv.c: the results of a tile, and products for instruction sets without float16 arithmetic.

   Activations and weights have scales that are powers of two (half.py): those of activations leave room for 2^13 times the largest
   example, and those of weights make sums of HALF_SUM products fit in float16. Sums of a tile are float32. */
#ifndef SMARTPRUNE_HALF_H
#define SMARTPRUNE_HALF_H

/* Applies scale, bias, activation and addition to the sums of a tile, and stores the results. */
static SEPARATE void finish_halves(int TH, int TW, const vfloat *sum, const Op *op, int group, int segment) {
  const Tensor y = op->y, z = op->z; /* local copies: the compiler assumes that stores may change *op */
  const int64_t channel = (int64_t)group * WIDTH;
  const int64_t y_group = channel / LANES * y.plane + channel % LANES;
  const int64_t z_group = channel / LANES * z.plane + channel % LANES;
  const vfloat scale = *(const vfloat_u *)(op->scale + channel), bias = *(const vfloat_u *)(op->bias + channel);
  const vfloat low = all(op->low), high = all(op->high);
  const float unit = 1.0f / y.scale;
  for (int r = 0; r < TH; r++, segment++) {
    int64_t y_at = y_group + op->y_start[segment];
    int64_t z_at = op->addition ? z_group + op->z_start[segment] : 0;
    for (int p = 0; p < TW; p++, sum++, y_at += LANES, z_at += LANES) {
      vfloat v = *sum * scale + bias;
      if (op->activation != CLAMP) {
        float values[WIDTH];
        memcpy(values, &v, sizeof v);
        sp_finish(op, values, 1, WIDTH, z_at);
        memcpy(&v, values, sizeof v);
      } else {
        if (op->addition == ADD_BEFORE) v += from_halves((const half *)z.data + z_at) * z.scale;
        v = at_most(high, at_least(low, v));
        if (op->addition == ADD_AFTER) v += from_halves((const half *)z.data + z_at) * z.scale;
      }
      store_halves((half *)y.data + y_at, v * unit);
    }
  }
}

INLINE void finish(const int TH, const int TW, const vfloat *sum, const Op *op, int group, int segment) {
  vfloat stored[16]; /* in memory: a loop over pixels is shorter code, and it runs once per tile */
  UNROLL for (int i = 0; i < TH * TW; i++) stored[i] = sum[i];
  finish_halves(TH, TW, stored, op, group, segment);
}

#ifndef HAVE_PRODUCTS
#define HAVE_PRODUCTS
/* Multiplies in float32. An entry has at most WIDTH input channels; what follows them in memory is read, but not used. */
INLINE void products(const int TH, const int TW, const int STRIDE, vfloat *sum, const vfloat initial, const word *const *row,
                     const int32_t *offsets, int entries, int inner, const vfloat *weights, int once) {
  const half *weight = (const half *)weights;
  (void)once;
  UNROLL for (int i = 0; i < TH * TW; i++) sum[i] = initial;
  for (int e = 0; e < entries; e++) {
    float x[16][WIDTH];
    for (int r = 0; r < TH; r++)
      for (int p = 0; p < TW; p++) *(vfloat_u *)x[r * TW + p] = from_halves(row[r] + offsets[e] + p * STRIDE);
    for (int i = 0; i < inner; i++, weight += WIDTH) {
      const vfloat w = from_halves(weight);
      UNROLL for (int p = 0; p < TH * TW; p++) sum[p] += w * x[p][i];
    }
  }
}
#endif
#endif
