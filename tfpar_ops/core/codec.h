// Gradient codecs behind a C ABI: CPU implementation. FORMAT.md specifies what each codec computes, byte by byte.
//
// A vector is divided into blocks of `codec.block` elements. A function that takes `first_block, last_block` processes
// the blocks [first_block, last_block) and touches nothing else, so a caller may spread one vector over any number of
// threads; the results do not depend on the number. No function allocates, locks, throws or logs. Vectors may have more
// than 2^31 elements. The caller's floating-point mode (rounding, denormals) is neither used nor changed.
#ifndef TFPAR_OPS_CORE_CODEC_H_
#define TFPAR_OPS_CORE_CODEC_H_

#include <stddef.h>
#include <stdint.h>

#include "formats.h"  // enum tfpar_kind

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#pragma GCC visibility push(default)  // a shared library exports these functions even if it hides all others
#endif

// The version of the interface between the library and its callers. Raise it with every change of these functions, of
// their results, or of the operations. tfpar_ops/library.py has the same number and rejects a library with another one.
#define TFPAR_ABI_VERSION 4
int32_t tfpar_abi_version(void);

typedef struct tfpar_codec {
  int32_t kind;        // tfpar_kind: the number in the header of a payload
  int32_t block;       // elements per block, a power of two; formats.h has the limits
  int32_t keep;        // elements kept per block, 1..block; 0 for a format that keeps every element
  int32_t scale_bits;  // 16 (bfloat16) or 32 (float32); 0 for a format without float scales
  int32_t stochastic;  // 1 for stochastic rounding, in a format that has it; else 0
  uint64_t seed;       // of the random numbers for stochastic rounding
  uint64_t step;       // of the random numbers for stochastic rounding
} tfpar_codec;

// Several arrays seen as one vector: part i holds elements [offset[i], offset[i + 1]). `offset` has parts + 1 entries,
// offset[0] = 0; parts may be empty.
typedef struct tfpar_vector {
  const float* const* data;
  const int64_t* offset;
  int64_t parts;
} tfpar_vector;

typedef struct tfpar_mutable_vector {
  float* const* data;
  const int64_t* offset;
  int64_t parts;
} tfpar_mutable_vector;

// Returns 0 if the options are valid; else 1, and a message with the option, its value and the allowed values.
int tfpar_codec_check(const tfpar_codec* codec, char* message, size_t message_size);

// Bytes of the payload of n elements, a multiple of 16; -1 if n is negative or too large to be counted.
int64_t tfpar_payload_bytes(const tfpar_codec* codec, int64_t n);

// Number of blocks that hold n elements.
int64_t tfpar_num_blocks(const tfpar_codec* codec, int64_t n);

// Returns 0 if `payload` has this codec, n elements and this length; else 1, and a message with the expected value.
// Reads only the header: decoding is safe whatever bytes follow it.
int tfpar_payload_check(const tfpar_codec* codec, int64_t n, const void* payload, int64_t bytes, char* message,
                        size_t message_size);

// For a topk payload that has passed tfpar_payload_check: returns 0 if every position in blocks [first_block,
// last_block) is below the block size; else 1, and a message naming the first invalid position. Returns 0 for other
// codecs, which have no positions.
int tfpar_positions_check(const tfpar_codec* codec, const void* payload, int64_t first_block, int64_t last_block,
                          char* message, size_t message_size);

// Writes header and closing padding of a payload; the blocks are written by the functions below.
void tfpar_write_frame(const tfpar_codec* codec, int64_t n, void* payload);

// Encodes elements [begin, begin + n) of `x`; those past its end are padding. `begin` is a multiple of the block size.
//   residual: element i belongs to element begin + i of `x`; ends where `x` ends; NULL for none.
//   new_residual: may be `residual` itself; NULL if not needed.
//   payload: tfpar_payload_bytes(codec, n) bytes.
//   norms: [last_block - first_block][2]: each block's sum of squares of x and of the new residual; NULL if not needed.
void tfpar_encode(const tfpar_codec* codec, const tfpar_vector* x, int64_t begin, int64_t n, const float* residual,
                  float* new_residual, void* payload, int64_t first_block, int64_t last_block, double* norms);

// Decodes `peers` payloads of n elements each, sums them, multiplies the sum by `factor` and writes its element i to
// element begin + i of `out`; elements past the end of `out` are dropped. Payloads must have passed
// tfpar_payload_check. Returns 0, or 1 if a position in a topk payload was not below the block size (that entry was
// ignored).
int tfpar_decode_sum(const tfpar_codec* codec, int64_t n, const void* const* payloads, int64_t peers, float factor,
                     const tfpar_mutable_vector* out, int64_t begin, int64_t first_block, int64_t last_block);

// Decodes and sums as above, adds the residual and encodes again.
//   valid: number of elements that exist; [valid, n) is padding.
//   begin: position of element 0 in the whole vector, a multiple of the block size. It selects the random numbers.
//   residual, new_residual, norms: as for tfpar_encode, with `valid` elements; norms[.][0] is that of the scaled sum.
int tfpar_recode(const tfpar_codec* codec, int64_t n, const void* const* payloads, int64_t peers, float factor,
                 int64_t valid, int64_t begin, const float* residual, float* new_residual, void* payload,
                 int64_t first_block, int64_t last_block, double* norms);

// Sum of squares of elements [begin, end) of x, in an order that depends on begin and end alone. The sum is finite if
// and only if every element is.
double tfpar_sum_squares(const tfpar_vector* x, int64_t begin, int64_t end);

// The instruction set in use: "x86-64-v4", "x86-64-v3" or "baseline". The environment variable TFPAR_OPS_TARGET, which
// is read once, may select a lower one than the processor has.
const char* tfpar_cpu_target(void);

// y = a * x + y in that instruction set: benchmarks compare the codecs with its memory bandwidth. x and y do not
// overlap.
void tfpar_triad(float a, const float* x, float* y, int64_t n);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif

#endif  // TFPAR_OPS_CORE_CODEC_H_
