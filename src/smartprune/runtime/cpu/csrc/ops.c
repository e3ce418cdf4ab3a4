/* All operations except the kernels of convolutions. A vector holds the 16 channels of a block. */
#include "windows.h"

LOCAL void sp_finish(const Op *op, float *values, int pixels, int lanes, int64_t z_at) {
  float v[LANES] = {0}, z[LANES] = {0};
  const float unit = op->y.type == QUANTUM ? 1.0f / op->y.scale : 1.0f; /* the kernel stores quanta */
  for (int p = 0; p < pixels; p++) {
    memcpy(v, values + p * lanes, 4 * (size_t)lanes);
    if (op->addition && op->z.type == FLOAT16) {
      half stored[LANES] = {0};
      memcpy(stored, (const half *)op->z.data + z_at + (int64_t)p * LANES, 2 * (size_t)lanes);
      *(vfloat_u *)z = from_halves(stored) * op->z.scale;
    } else if (op->addition)
      for (int l = 0; l < lanes; l++) {
        const int64_t at = z_at + (int64_t)p * LANES + l;
        z[l] = op->z.type == FLOAT32 ? ((const float *)op->z.data)[at] : (((const quantum *)op->z.data)[at] - op->z.zero) * op->z.scale;
      }
    vfloat r = *(vfloat_u *)v;
    if (op->addition == ADD_BEFORE) r += *(vfloat_u *)z;
    r = activated(op, r);
    if (op->addition == ADD_AFTER) r += *(vfloat_u *)z;
    r *= unit;
    memcpy(values + p * lanes, &r, 4 * (size_t)lanes);
  }
}

/* The rows of the caller's map and their length in pixels. Rows without gaps between them count as one long row. */
INLINE void as_rows(const External *e, int height, int width, int *rows, int *length) {
  const int one = e->row == width * e->column;
  *rows = one ? 1 : height;
  *length = one ? height * width : width;
}

/* The position in the tensor of pixel `p` of row `r`, as counted by as_rows. */
INLINE int64_t pixel(const Tensor *t, int r, int p) {
  const int h = r + p / t->width, w = p % t->width; /* r is 0 for one long row; otherwise p is less than the width */
  return h * t->row + (int64_t)w * LANES;
}

#ifdef HAVE_TRANSPOSE
#define FAST_TRANSPOSE 1
#else
#define FAST_TRANSPOSE 0 /* not worth it for few channels */
#endif

static void import(const Op *op, int item, const External *e) {
  const Tensor Y = op->y, *y = &Y; /* a local copy: the compiler assumes that byte stores may change *op */
  const External from = *e;
  const int block = item % y->blocks;
  const int real = y->channels - block * LANES < LANES ? y->channels - block * LANES : LANES;
  const float *x = (const float *)from.data + item / y->blocks * from.image + block * LANES * from.channel;
  const int64_t to = origin(y, item);
  int rows, length;
  as_rows(&from, y->height, y->width, &rows, &length);
  for (int r = 0; r < rows; r++) {
    const float *line = x + r * from.row;
    if (from.column == 1 && (real > 4 || FAST_TRANSPOSE)) {
      for (int p = 0; p < length; p += LANES) { /* transpose 16 channels of 16 pixels at a time */
        const int count = length - p < LANES ? length - p : LANES;
        vfloat v[LANES];
        for (int l = 0; l < LANES; l++) v[l] = l < real ? load_some(line + l * from.channel + p, count) : (vfloat){0};
        transpose(v);
        for (int i = 0; i < count; i++) save(y, to + pixel(y, r, p + i), v[i]);
      }
    } else if (from.channel == 1) {
      for (int p = 0; p < length; p++) save(y, to + pixel(y, r, p), load_some(line + p * from.column, real));
    } else {
      for (int p = 0; p < length; p++) {
        float v[LANES] = {0};
        for (int l = 0; l < real; l++) v[l] = line[p * from.column + l * from.channel];
        save(y, to + pixel(y, r, p), *(vfloat_u *)v);
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
      vfloat v[LANES];
      for (int i = 0; i < LANES; i++) v[i] = i < count ? load(x, from + pixel(x, r, p + i)) : (vfloat){0};
      if (to.channel == 1) {
        for (int i = 0; i < count; i++) save_some(line + i * to.column, v[i], real);
      } else { /* the caller's result is dense, so neighbouring pixels are adjacent */
        transpose(v);
        for (int l = 0; l < real; l++) save_some(line + l * to.channel, v[l], count);
      }
    }
}

typedef Kernel (*Chooser)(int index);

LOCAL Kernel sp_kernel_f32_8(int index);
#if HAS_WIDTH_16
LOCAL Kernel sp_kernel_f32_16(int index);
#endif
#if WITH_FLOAT16
LOCAL Kernel sp_kernel_f16_8(int index);
#endif
#if WITH_INT8
LOCAL Kernel sp_kernel_i8_8(int index);
#endif
#if WITH_INT8 && HAS_WIDTH_16
LOCAL Kernel sp_kernel_i8_16(int index);
#endif

INLINE Chooser choose_kernel(const Op *op) {
  (void)op;
#if WITH_FLOAT16
  if (op->x.type == FLOAT16) return sp_kernel_f16_8;
#endif
#if WITH_INT8 && HAS_WIDTH_16
  if (op->x.type == QUANTUM) return op->lanes == 16 ? sp_kernel_i8_16 : sp_kernel_i8_8;
#elif WITH_INT8
  if (op->x.type == QUANTUM) return sp_kernel_i8_8;
#endif
#if HAS_WIDTH_16
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
    for (int r = op->chunk_start[chunk]; r < op->chunk_start[chunk + 1]; r++)
      kernel(op->run[3 * r])(op, group, op->run[3 * r + 1], op->run[3 * r + 2]);
}

enum { CHUNK = 64 };

static void mean(const Op *op, int item) {
  const Tensor X = op->x, *x = &X;
  const int64_t from = origin(x, item), pixels = (int64_t)x->height * x->width;
  vfloat total = {0}, part = {0};
  int64_t at = from;
  int w = 0;
  for (int64_t done = 0; done < pixels; done += CHUNK) { /* add partial sums: a single float sum would lose small terms */
    const int count = pixels - done < CHUNK ? (int)(pixels - done) : CHUNK;
    vfloat sum[4] = {0};
    for (int i = 0; i < count; i++) {
      sum[i % 4] += load(x, at);
      at += LANES;
      if (++w == x->width) w = 0, at += x->row - (int64_t)x->width * LANES;
    }
    part += (sum[0] + sum[1]) + (sum[2] + sum[3]);
    if (done / CHUNK % CHUNK == CHUNK - 1) total += part, part = (vfloat){0};
  }
  save(&op->y, origin(&op->y, item), (total + part) * (1.0f / (float)pixels));
}

/* One result per pixel of x and z. z is a map of the same size, or has one value per channel. */
INLINE void pointwise_as(const Op *op, int item, const int KIND, const int PLAIN) {
  const Tensor X = op->x, Y = op->y, Z = op->z, *x = &X, *y = &Y, *z = &Z;
  const int two = KIND == ADD || KIND == MULTIPLY;
  const int x_type = PLAIN ? FLOAT32 : x->type, y_type = PLAIN ? FLOAT32 : y->type, z_type = PLAIN ? FLOAT32 : z->type;
  const int64_t from = origin(x, item), to = origin(y, item);
  const int64_t other = two ? origin(z, z->images == 1 ? item % y->blocks : item) : 0;
  const int64_t z_row = two && z->height > 1 ? z->row : 0, z_column = two && z->width > 1 ? LANES : 0;
  vfloat scale = {0}, bias = {0};
  if (KIND == AFFINE) {
    scale = *(const vfloat_u *)(op->scale + item % y->blocks * LANES);
    bias = *(const vfloat_u *)(op->bias + item % y->blocks * LANES);
  }
  for (int h = 0; h < y->height; h++)
    for (int w = 0; w < y->width; w++) {
      vfloat v = load_as(x_type, x, from + h * x->row + (int64_t)w * LANES);
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

/* Nearest-neighbour upsampling by integers: y[..., h, w] = x[..., h / sh, w / sw]. */
static void upsample(const Op *op, int item) {
  const Tensor X = op->x, Y = op->y, *x = &X, *y = &Y; /* local copies, see import */
  for (int h = 0; h < y->height; h++) {
    const int64_t from = origin(x, item) + h / op->sh * x->row;
    for (int w = 0, c = 0; w < y->width; c++) {
      const vfloat v = load(x, from + (int64_t)c * LANES);
      for (int k = 0; k < op->sw; k++, w++) save(y, origin(y, item) + h * y->row + (int64_t)w * LANES, v);
    }
  }
}

/* Bilinear upsampling; `flag` aligns corners. scale[0] and scale[1] are input pixels per output pixel. */
INLINE float source(const Op *op, int place, float ratio) {
  if (op->flag) return (float)place * ratio;
  const float at = ((float)place + 0.5f) * ratio - 0.5f;
  return at > 0.0f ? at : 0.0f;
}

static void bilinear(const Op *op, int item) {
  const Tensor X = op->x, Y = op->y, *x = &X, *y = &Y; /* local copies, see import */
  for (int h = 0; h < y->height; h++) {
    const float down = source(op, h, op->scale[0]);
    const int r0 = (int)down < x->height - 1 ? (int)down : x->height - 1, r1 = r0 + (r0 < x->height - 1);
    const float fr = down - (float)r0;
    const int64_t top = origin(x, item) + r0 * x->row, low = origin(x, item) + r1 * x->row;
    for (int w = 0; w < y->width; w++) {
      const float across = source(op, w, op->scale[1]);
      const int c0 = (int)across < x->width - 1 ? (int)across : x->width - 1, c1 = c0 + (c0 < x->width - 1);
      const float fc = across - (float)c0;
      const vfloat a = load(x, top + (int64_t)c0 * LANES) * (1.0f - fc) + load(x, top + (int64_t)c1 * LANES) * fc;
      const vfloat b = load(x, low + (int64_t)c0 * LANES) * (1.0f - fc) + load(x, low + (int64_t)c1 * LANES) * fc;
      save(y, origin(y, item) + h * y->row + (int64_t)w * LANES, a * (1.0f - fr) + b * fr);
    }
  }
}

/* Copies x to the channels of y from `argument` on, which need not be the first of a block. An item is one image. */
static void shift(const Op *op, int item) {
  const Tensor X = op->x, Y = op->y, *x = &X, *y = &Y; /* local copies, see import */
  for (int h = 0; h < x->height; h++)
    for (int c = 0; c < x->channels; c++) {
      const int to = c + op->argument;
      const int64_t from_at = item * x->image + c / LANES * x->plane + h * x->row + c % LANES;
      const int64_t to_at = item * y->image + to / LANES * y->plane + h * y->row + to % LANES;
      for (int w = 0; w < x->width; w++) {
        if (x->type == FLOAT32) ((float *)y->data)[to_at + (int64_t)w * LANES] = ((const float *)x->data)[from_at + (int64_t)w * LANES];
        else if (x->type == FLOAT16) ((half *)y->data)[to_at + (int64_t)w * LANES] = ((const half *)x->data)[from_at + (int64_t)w * LANES];
        else ((quantum *)y->data)[to_at + (int64_t)w * LANES] = ((const quantum *)x->data)[from_at + (int64_t)w * LANES];
      }
    }
}

/* Moves numbers: a position in x is the sum over the axes of y, or with `flag` a number in one table. Where one is negative, y is
   zero. */
static void gather(const Op *op, int item) {
  const Tensor X = op->x, Y = op->y, *x = &X, *y = &Y; /* local copies, see import */
  const int32_t *all = op->x_start + (int64_t)item * y->height * y->width * LANES, none[LANES] = {0};
  const int32_t image = op->flag ? 0 : op->x_start[item / y->blocks];
  const int32_t *channel = op->flag ? none : op->y_start + item % y->blocks * LANES;
  for (int h = 0; h < y->height; h++)
    for (int w = 0; w < y->width; w++) {
      const int64_t to = origin(y, item) + h * y->row + (int64_t)w * LANES;
      const int32_t row = op->flag ? 0 : op->z_start[h], column = op->flag ? 0 : op->run[w];
      for (int l = 0; l < LANES; l++) {
        const int32_t rest = op->flag ? all[((int64_t)h * y->width + w) * LANES + l] : 0;
        const int zero = (image | channel[l] | row | column | rest) < 0;
        const int64_t from = zero ? 0 : (int64_t)image + channel[l] + row + column + rest;
        if (x->type == FLOAT32) ((float *)y->data)[to + l] = zero ? 0.0f : ((const float *)x->data)[from];
        else if (x->type == FLOAT16) ((half *)y->data)[to + l] = zero ? 0 : ((const half *)x->data)[from];
        else ((quantum *)y->data)[to + l] = zero ? (quantum)y->zero : ((const quantum *)x->data)[from];
      }
    }
}

/* The channels of block `b`, with zeros for those beyond the last. */
INLINE vfloat without_rest(const Tensor *t, int b, vfloat v) {
  for (int l = 0; l < LANES && t->channels < (b + 1) * LANES; l++) v[l] = b * LANES + l < t->channels ? v[l] : 0.0f;
  return v;
}

INLINE float sum_of(vfloat v) {
  float total = 0.0f;
  for (int l = 0; l < LANES; l++) total += v[l];
  return total;
}

/* Softmax over the channels of every pixel. An item is one image. */
static void softmax(const Op *op, int item) {
  const Tensor X = op->x, Y = op->y, *x = &X, *y = &Y; /* local copies, see import */
  for (int h = 0; h < y->height; h++)
    for (int w = 0; w < y->width; w++) {
      const int64_t from = item * x->image + h * x->row + (int64_t)w * LANES, to = item * y->image + h * y->row + (int64_t)w * LANES;
      float largest = -INFINITY;
      vfloat sums = {0};
      for (int b = 0; b < x->blocks; b++) {
        const vfloat v = load(x, from + b * x->plane);
        for (int l = 0; l < LANES && l < x->channels - b * LANES; l++) largest = v[l] > largest ? v[l] : largest;
      }
      for (int b = 0; b < x->blocks; b++) sums += without_rest(x, b, exponential(load(x, from + b * x->plane) - largest));
      const float total = sum_of(sums), shift = op->flag ? largest + logf(total) : largest, scale = 1.0f / total;
      for (int b = 0; b < x->blocks; b++) {
        const vfloat v = load(x, from + b * x->plane) - shift;
        save(y, to + b * y->plane, op->flag ? v : exponential(v) * scale);
      }
    }
}

/* Normalizes the channels of every pixel; scale and bias have one number per channel. An item is one image. The first mean is
   rounded, which shows if it is large, so the mean of what is left is subtracted too. */
static void layer_norm(const Op *op, int item) {
  const Tensor X = op->x, Y = op->y, *x = &X, *y = &Y; /* local copies, see import */
  const float channels = (float)x->channels;
  for (int h = 0; h < y->height; h++)
    for (int w = 0; w < y->width; w++) {
      const int64_t from = item * x->image + h * x->row + (int64_t)w * LANES, to = item * y->image + h * y->row + (int64_t)w * LANES;
      vfloat total = {0}, left = {0}, squares = {0};
      for (int b = 0; b < x->blocks; b++) total += without_rest(x, b, load(x, from + b * x->plane));
      const float center = sum_of(total) / channels;
      for (int b = 0; b < x->blocks; b++) {
        const vfloat v = without_rest(x, b, load(x, from + b * x->plane) - center);
        left += v, squares += v * v;
      }
      const float rest = sum_of(left) / channels, difference = sum_of(squares) / channels - rest * rest;
      const float variance = difference < 0.0f ? 0.0f : difference, factor = 1.0f / sqrtf(variance + op->slope);
      for (int b = 0; b < x->blocks; b++) {
        const vfloat scale = *(const vfloat_u *)(op->scale + b * LANES), bias = *(const vfloat_u *)(op->bias + b * LANES);
        save(y, to + b * y->plane, (load(x, from + b * x->plane) - center - rest) * factor * scale + bias);
      }
    }
}

LOCAL void sp_work(const Op *op, int item, const External *external) {
#define RUN(kind, call) \
  case kind:            \
    if (USES(kind)) call; \
    return;
  switch (op->kind) {
    RUN(IMPORT, import(op, item, external + op->argument))
    RUN(EXPORT, export(op, item, external + op->argument))
    RUN(CONV, conv(op, item))
    RUN(DEPTHWISE, depthwise(op, item))
    RUN(MAX_POOL, pool(op, item))
    RUN(AVERAGE_POOL, pool(op, item))
    RUN(MEAN, mean(op, item))
    RUN(UNARY, pointwise(op, item))
    RUN(AFFINE, pointwise(op, item))
    RUN(ADD, pointwise(op, item))
    RUN(MULTIPLY, pointwise(op, item))
    RUN(COPY, pointwise(op, item))
    RUN(SHIFT, shift(op, item))
    RUN(UPSAMPLE, upsample(op, item))
    RUN(BILINEAR, bilinear(op, item))
    RUN(GATHER, gather(op, item))
    RUN(SOFTMAX, softmax(op, item))
    RUN(LAYER_NORM, layer_norm(op, item))
  }
}
