// Gradient codecs behind a C ABI: CPU implementation. FORMAT.md says what each one computes, byte by byte.
//
// Work is cut into blocks of `codec.block` elements. Every function that takes `first_block, last_block` does the blocks
// [first_block, last_block) and touches nothing else, so that a caller may spread one vector over any number of threads;
// results never depend on how it does. Functions neither allocate, lock, throw nor log. Vectors may be longer than 2^31.
// The caller's floating-point mode (rounding, denormals) is neither used nor changed.
#ifndef TFPAR_OPS_CORE_CODEC_H_
#define TFPAR_OPS_CORE_CODEC_H_

#include <stddef.h>
#include <stdint.h>

#include "formats.h"  // enum tfpar_kind

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#pragma GCC visibility push(default)  // what a shared library exports, whatever it hides otherwise
#endif

// What the library and its callers must agree on: to be raised with every change of these functions, of what they compute,
// or of the operations. tfpar_ops/library.py has the same number, and loads no library that has another one.
#define TFPAR_ABI_VERSION 3
int32_t tfpar_abi_version(void);

typedef struct tfpar_codec {
  int32_t kind;        // tfpar_kind: the number in the header of a payload
  int32_t block;       // elements per block, a power of two; formats.h has the limits
  int32_t keep;        // of a format that keeps some: elements kept per block, 1..block; else 0
  int32_t scale_bits;  // of a format with float scales: 16 (bfloat16) or 32 (float32); else 0
  int32_t stochastic;  // of a format that can: 1 for stochastic rounding; else 0
  uint64_t seed;       // of stochastic rounding
  uint64_t step;       // of stochastic rounding
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

// 0 if the options are valid; else 1, and a message naming option, value and what is allowed.
int tfpar_codec_check(const tfpar_codec* codec, char* message, size_t message_size);

// Bytes of the payload of n elements, a multiple of 16; -1 if n is negative or too large to be counted.
int64_t tfpar_payload_bytes(const tfpar_codec* codec, int64_t n);

// Number of blocks of n elements.
int64_t tfpar_num_blocks(const tfpar_codec* codec, int64_t n);

// 0 if `payload` is one of this codec, of n elements and of this length; else 1, and a message saying what was expected. Reads
// the header only: what follows it is safe to decode whatever it holds.
int tfpar_payload_check(const tfpar_codec* codec, int64_t n, const void* payload, int64_t bytes, char* message,
                        size_t message_size);

// 0 if every position in blocks [first_block, last_block) of a topk payload that has passed the check above is below the
// block size; else 1, and a message saying which one is not. Other codecs have no positions.
int tfpar_positions_check(const tfpar_codec* codec, const void* payload, int64_t first_block, int64_t last_block,
                          char* message, size_t message_size);

// Writes header and closing padding of a payload; the blocks are written by the functions below.
void tfpar_write_frame(const tfpar_codec* codec, int64_t n, void* payload);

// Encodes elements [begin, begin + n) of `x`; those past its end are padding. `begin` is a multiple of the block size.
//   residual: element i belongs to element begin + i of `x`; NULL for none. As many as there are before the end of `x`.
//   new_residual: may be `residual` itself; NULL if it is not wanted.
//   payload: of tfpar_payload_bytes(codec, n) bytes.
//   norms: [last_block - first_block][2]: sum of squares of x, and of the new residual, of each block; NULL if not wanted.
void tfpar_encode(const tfpar_codec* codec, const tfpar_vector* x, int64_t begin, int64_t n, const float* residual,
                  float* new_residual, void* payload, int64_t first_block, int64_t last_block, double* norms);

// Decodes `peers` payloads of n elements each, sums them, multiplies by `factor` and writes element i to element begin + i of
// `out`; what lies past the end of `out` is dropped. Payloads must have passed tfpar_payload_check.
// Returns 0, or 1 if a position in a topk payload was not below the block size (that entry was left out).
int tfpar_decode_sum(const tfpar_codec* codec, int64_t n, const void* const* payloads, int64_t peers, float factor,
                     const tfpar_mutable_vector* out, int64_t begin, int64_t first_block, int64_t last_block);

// Decodes and sums as above, adds the residual and encodes again.
//   valid: elements that exist; [valid, n) is padding.
//   begin: position of element 0 in the whole vector (random numbers count from there), a multiple of the block size.
//   residual, new_residual, norms: as for tfpar_encode, of `valid` elements; norms[.][0] is that of the scaled sum.
int tfpar_recode(const tfpar_codec* codec, int64_t n, const void* const* payloads, int64_t peers, float factor,
                 int64_t valid, int64_t begin, const float* residual, float* new_residual, void* payload,
                 int64_t first_block, int64_t last_block, double* norms);

// Sum of squares of elements [begin, end) of x, in an order that depends on begin and end alone. Not finite exactly
// if one of the elements is not.
double tfpar_sum_squares(const tfpar_vector* x, int64_t begin, int64_t end);

// Instruction set in use: "x86-64-v4", "x86-64-v3", "baseline". TFPAR_OPS_TARGET, read once, may ask for a lower one.
const char* tfpar_cpu_target(void);

// y = a * x + y in that instruction set: the memory bandwidth that benchmarks measure codecs by. x and y do not overlap.
void tfpar_triad(float a, const float* x, float* y, int64_t n);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif

#endif  // TFPAR_OPS_CORE_CODEC_H_
