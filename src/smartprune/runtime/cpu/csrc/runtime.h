/* What the sources of the CPU runtime share. Python mirrors the structures in native.py, field by field.

   An activation is stored as [image][block of 16 channels][row][column][16 channels], with a margin of zeros around
   every map that is as wide as the paddings of the layers that read it, so that no kernel tests for borders.
   Strides count elements; data points at the first pixel inside the margin. */
#ifndef SMARTPRUNE_RUNTIME_H
#define SMARTPRUNE_RUNTIME_H
#include <stdint.h>

#define LANES 16 /* channels of a block */

/* int8 arithmetic: with VNNI an activation is a byte, and four of them fill the 32-bit word that one instruction
   multiplies; without, it is a 16-bit number (of the same 256 values), and two fill a word. */
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define BYTES 1
typedef uint8_t quantum;
#else
#define BYTES 0
typedef uint16_t quantum;
#endif

enum { FLOAT32 = 0, QUANTUM = 1 };
enum { CLAMP = 0, SILU = 1, SIGMOID = 2, HARDSWISH = 3, HARDSIGMOID = 4, LEAKY = 5, GELU = 6 };
enum { ADD_NONE = 0, ADD_BEFORE = 1, ADD_AFTER = 2 }; /* a second operand is added before or after the activation */

typedef struct {
  char *data;
  int64_t image, plane, row;
  int32_t images, blocks, height, width, channels, type;
  float scale, zero; /* value = scale * (stored - zero) */
} Tensor;

typedef struct {
  int32_t kind, activation, adding, items;
  float low, high, slope; /* bounds of a clamp; slope of a leaky ReLU; constants of a scalar operation */
  int32_t inner;          /* words per entry of a convolution */
  Tensor x, y, z;
  /* convolution: groups of output channels, entries of each, runs of equal tiles, chunks of runs */
  int32_t groups, groups_per_item, chunks, lanes;
  const int32_t *start;   /* [groups + 1] first entry of every group */
  const int32_t *offset;  /* [entries] where an entry's input channels lie, in words from the pixel */
  const char *weight;     /* [entries][inner][lanes] words */
  const float *bias, *scale;
  const int32_t *begin;   /* where the sums of a quantized convolution begin: less the zero point times the weights */
  const int32_t *run;     /* [runs][3] kernel, first segment, number of tiles */
  const int32_t *chunk;   /* [chunks + 1] first run of every chunk */
  const int32_t *in, *out, *side; /* [segments] where a stretch of pixels begins in x, y and z */
  /* windows of pooling and of depthwise convolutions */
  int32_t kh, kw, sh, sw, ph, pw, dh, dw, include, port;
} Op;

typedef struct {
  const void *data;
  int64_t image, channel, row, column;
} External; /* a tensor of the caller, float32, any strides */

typedef void (*Kernel)(const Op *op, int group, int segment, int tiles);

Kernel sp_kernel_f32_16(int index);
Kernel sp_kernel_f32_8(int index);
Kernel sp_kernel_i8_16(int index);
Kernel sp_kernel_i8_8(int index);

enum { IMPORT, EXPORT, CONV, DEPTHWISE, MAX_POOL, AVERAGE_POOL, MEAN, UNARY, AFFINE, ADD, MULTIPLY, COPY, SHIFT, UPSAMPLE, BILINEAR };

/* One item of an operation; for all but convolutions that is one block of 16 channels of one image. */
void sp_work(const Op *op, int item, const External *external);

/* Applies activation and addition to results in memory: what the kernels do not do in registers. */
void sp_finish(const Op *op, float *values, int pixels, int lanes, int64_t side);
#endif
