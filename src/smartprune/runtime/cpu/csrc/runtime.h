/* Declarations shared by the C sources of the CPU runtime. abi.py mirrors the tables and the structures.

   An activation is stored as [image][block of 16 channels][row][column][16 channels]. A margin of zeros, as wide as the
   paddings of the layers that read it, surrounds every map, so kernels do not test for borders.
   Strides count elements. `data` points at the first pixel inside the margin.

   The build defines these macros from the row of the instruction set (instruction_sets.py):
   ISA_HEADER     header with its primitives; undefined for portable code
   MOST_PIXELS    most pixels of a tile
   QUANTUM_BYTES  bytes of a quantized activation, 1 or 2
   LOWEST_QUANTUM the smallest quantized activation, 0 or -128
   WORD_BYTES     bytes of quantized activations that one instruction multiplies with a channel's weights
   HAS_WIDTH_16   whether conv.c is compiled for 16 output channels too, not only for 8
   HALF_PIXELS    most pixels of a tile where instructions multiply float16 numbers; 0 if there are none
   HALF_SUM       most products that are added in float16

   A network that is exported as C contains these sources in one file (see c_source/kernels.py). It also defines:
   LOCAL          static, so that no name leaves the file
   USES           which operations there are: USES(operation)
   APPLIES        which activations there are: APPLIES(activation)
   TILES          the tiles of conv.c that there are */
#ifndef SMARTPRUNE_RUNTIME_H
#define SMARTPRUNE_RUNTIME_H
#include <stdint.h>

#define LANES 16 /* channels of a block */

#ifndef LOCAL
#define LOCAL
#endif
#ifndef USES
#define USES(operation) 1
#endif
#ifndef APPLIES
#define APPLIES(activation) 1
#endif

/* int8 arithmetic multiplies words of quantized activations. A quantized activation has one of 256 values. It takes
   one byte where one instruction multiplies four of them, else two bytes. */
#if QUANTUM_BYTES == 2
typedef uint16_t quantum;
#elif LOWEST_QUANTUM < 0
typedef int8_t quantum;
#else
typedef uint8_t quantum;
#endif
#define HIGHEST_QUANTUM (LOWEST_QUANTUM + 255)

typedef uint16_t half; /* the bits of a float16 number: not all compilers have a type for it */

/* Python refers to these by name. pool.c exports the names, and Python compares them with its own when it loads the library. */
#define OPERATIONS(X)                                                                                                  \
  X(IMPORT) X(EXPORT) X(CONV) X(DEPTHWISE) X(MAX_POOL) X(AVERAGE_POOL) X(MEAN) X(UNARY) X(AFFINE) X(ADD) X(MULTIPLY)   \
  X(COPY) X(SHIFT) X(UPSAMPLE) X(BILINEAR) X(GATHER) X(SOFTMAX) X(LAYER_NORM)
#define ACTIVATIONS(X) X(CLAMP) X(SILU) X(SIGMOID) X(HARDSWISH) X(HARDSIGMOID) X(LEAKY) X(GELU)      \
  X(TANH) X(ELU) X(GELU_TANH) X(MISH)
#define ADDITIONS(X) X(ADD_NONE) X(ADD_BEFORE) X(ADD_AFTER) /* add a second operand before or after the activation */
#define TYPES(X) X(FLOAT32) X(QUANTUM) X(FLOAT16)

#define ENUMERATOR(name) name,
enum { OPERATIONS(ENUMERATOR) };
enum { ACTIVATIONS(ENUMERATOR) };
enum { ADDITIONS(ENUMERATOR) };
enum { TYPES(ENUMERATOR) };

typedef struct {
  char *data;
  int64_t image, plane, row;
  int32_t images, blocks, height, width, channels, type;
  float scale, zero; /* value = scale * (stored - zero); zero is 0 for float16 */
} Tensor;

typedef struct {
  int32_t kind, activation, addition, items;
  float low, high, slope; /* bounds of a clamp; slope of a leaky ReLU or an ELU; what a layer norm adds to the variance */
  int32_t inner;          /* words per entry of a convolution, or per row of a depthwise kernel (0: weights are floats) */
  Tensor x, y, z;
  /* Convolution: groups of output channels, each with its entries; chunks of runs of equal tiles. */
  int32_t groups, groups_per_item, chunks, lanes;
  const int32_t *group_start;  /* [groups + 1] first entry of every group */
  const int32_t *entry_offset; /* [entries] position of an entry's input channels, in words from the pixel */
  const char *weight;          /* [entries][inner][lanes] words, or float16 numbers */
  const float *bias, *scale;
  const int32_t *initial_sum;  /* initial sums of a quantized convolution: minus the zero point times the weights */
  const int32_t *run;          /* [runs][3] kernel, first segment, number of tiles */
  const int32_t *chunk_start;  /* [chunks + 1] first run of every chunk */
  const int32_t *x_start, *y_start, *z_start; /* [segments] first pixel of a segment in x, y and z */
  /* Gather: x_start, y_start, z_start and run have the position in x for every image, channel, row and column of y, or
     x_start has all positions. */
  /* Windows of pooling and of depthwise convolutions. */
  int32_t kh, kw, sh, sw, ph, pw, dh, dw;
  int32_t flag;     /* average pool: count padding; bilinear: align corners; softmax: logarithm;
                       gather: one table */
  int32_t argument; /* import, export: number of the external tensor; average pool: divisor; shift: first channel */
} Op;

typedef struct {
  const void *data;
  int64_t image, channel, row, column;
} External; /* a float32 tensor of the caller with arbitrary strides */

typedef struct {
  const Op *ops;      /* [arenas][count] the operations, with a copy for each arena */
  External *external; /* [arenas][externals] memory for the tensors of a part */
  int32_t count, arenas, externals;
  int32_t parts, images; /* parts of a batch, and images of a part */
  int32_t together;      /* parts that run at the same time as others */
} Parts;

typedef void (*Kernel)(const Op *op, int group, int segment, int tiles); /* by its index from sp_kernel_... of conv.c */

/* Computes one item of an operation. An item is one block of 16 channels of one image, except of convolutions. Shifts,
   softmax and layer norms need all channels, so an item is one image. */
LOCAL void sp_work(const Op *op, int item, const External *external);

/* Applies the activation and the addition to results in memory, for activations that the kernels do not compute in registers. */
LOCAL void sp_finish(const Op *op, float *values, int pixels, int lanes, int64_t z_at);
#endif
