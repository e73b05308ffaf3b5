// Gradient codecs on CUDA devices: the functions of codec.h for vectors and payloads in device memory. FORMAT.md
// specifies what each codec computes; the payloads have the same bytes as those of the CPU implementation.
//
// Every function queues work on `stream` (a cudaStream_t) and returns at once: none synchronises, allocates or copies.
// The result is a cudaError_t, 0 for success. Invalid arguments are detected before anything is queued, except for
// TFPAR_CUDA_MAX_PARTS. Results depend neither on the device nor on how the work is distributed over it.
//
// Tables (data and offset of a vector, the list of payloads) are in host memory and may be freed after the call; the
// pointers in them point to device memory. Vectors and residuals may be at any float32 address, payloads at any
// multiple of 4 bytes. Both are fastest at multiples of 16 bytes.
//
// A device cannot reject a payload unless the host waits for it. Instead, a payload whose header does not match this
// codec and length makes the whole result NaN, and a topk position that is not below the block size makes its block
// NaN. Both set `status`.
#ifndef TFPAR_OPS_CORE_CUDA_CODEC_CUDA_H_
#define TFPAR_OPS_CORE_CUDA_CODEC_CUDA_H_

#include "../codec.h"

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#pragma GCC visibility push(default)  // as in codec.h
#endif

// The most payloads that one call can add up; a call with more returns cudaErrorInvalidValue.
#define TFPAR_CUDA_MAX_PEERS 64

// The most non-empty parts in 4096 consecutive elements (topk: in a block). A vector with more parts takes several
// launches; with more parts in one such place, a call returns cudaErrorNotSupported.
#define TFPAR_CUDA_MAX_PARTS 192

// Bytes of device memory that a call on n elements needs as `scratch` for its norms; `scratch` must be at a multiple of
// 8. For tfpar_cuda_sum_squares, `codec` is null. Returns -1 if n is negative.
int64_t tfpar_cuda_scratch_bytes(const tfpar_codec* codec, int64_t n);

// Encodes elements [begin, begin + n) of `x`; those past its end are padding. Also writes the header and the closing
// padding of the payload. The arguments are those of tfpar_encode, except
//   norms: two doubles, the sum of squares of x in the range and that of the new residual; NULL if not needed.
//   scratch: tfpar_cuda_scratch_bytes(codec, n) bytes; may be NULL if norms is.
int tfpar_cuda_encode(const tfpar_codec* codec, const tfpar_vector* x, int64_t begin, int64_t n, const float* residual,
                      float* new_residual, void* payload, double* norms, void* scratch, void* stream);

// Decodes `peers` payloads of n elements each, sums them, multiplies the sum by a factor and writes its element i to
// element begin + i of `out`; elements past the end of `out` are dropped.
//   factor: used if device_factor, a float in device memory, is NULL.
//   status: set to 1 if a payload is invalid, else unchanged; NULL if not needed.
int tfpar_cuda_decode_sum(const tfpar_codec* codec, int64_t n, const void* const* payloads, int64_t peers, float factor,
                          const float* device_factor, const tfpar_mutable_vector* out, int64_t begin, int32_t* status,
                          void* stream);

// Decodes and sums as above, adds the residual and encodes again. The arguments are those of tfpar_recode and those
// above; norms[0] is that of the scaled sum. `payload` must not overlap the payloads that are read.
int tfpar_cuda_recode(const tfpar_codec* codec, int64_t n, const void* const* payloads, int64_t peers, float factor,
                      const float* device_factor, int64_t valid, int64_t begin, const float* residual,
                      float* new_residual, void* payload, double* norms, void* scratch, int32_t* status, void* stream);

// Writes to `result`, a double in device memory, the sum of squares of elements [begin, end) of x. The sum is finite if
// and only if every element is. scratch: tfpar_cuda_scratch_bytes(NULL, end - begin) bytes.
int tfpar_cuda_sum_squares(const tfpar_vector* x, int64_t begin, int64_t end, double* result, void* scratch,
                           void* stream);

// out[j] = sum over i < count of norms[i][j], as float32, for j = 0 and 1: the totals of a vector that was encoded in
// shards. Both arrays are in device memory.
int tfpar_cuda_finish_norms(const double* norms, int64_t count, float* out, void* stream);

// *norm_squared = *sum as float32; *finite, one byte, is 1 if the sum is finite, else 0. All three are in device
// memory.
int tfpar_cuda_finish_sum(const double* sum, float* norm_squared, void* finite, void* stream);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif

#endif  // TFPAR_OPS_CORE_CUDA_CODEC_CUDA_H_
