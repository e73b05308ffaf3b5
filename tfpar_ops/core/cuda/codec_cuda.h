// Gradient codecs on CUDA devices: the functions of codec.h for vectors and payloads in device memory. FORMAT.md says
// what each codec computes; the bytes written are those of the CPU implementation.
//
// Every function queues work on `stream` (a cudaStream_t) and returns at once: none synchronises, allocates or copies.
// The result is a cudaError_t, 0 for success; errors of arguments are found before anything is queued, but for a limit
// on parts, below. Results depend neither on the device nor on how the work is spread over it.
//
// Tables (data and offset of a vector, the list of payloads) lie in host memory and may be dropped on return; the
// pointers in them are device memory. Vectors and residuals may lie at any float32 address, payloads at any multiple of
// 4 bytes. Speed is best where both are multiples of 16 bytes.
//
// A device cannot refuse a payload without being waited for. One whose header is not that of this codec and length
// makes the whole result NaN; a topk position that is not below the block size makes its block NaN. Both set `status`.
#ifndef TFPAR_OPS_CORE_CUDA_CODEC_CUDA_H_
#define TFPAR_OPS_CORE_CUDA_CODEC_CUDA_H_

#include "../codec.h"

#ifdef __cplusplus
extern "C" {
#endif

// Payloads that one call can add up; more are refused with cudaErrorInvalidValue.
#define TFPAR_CUDA_MAX_PEERS 64

// Parts, not counting empty ones, that may meet in 4096 consecutive elements (topk: in a block). Vectors of more parts
// take several launches; more in one place are refused with cudaErrorNotSupported.
#define TFPAR_CUDA_MAX_PARTS 192

// Bytes of device memory, at a multiple of 8, that a call on n elements needs as `scratch` for its norms. A null codec
// stands for tfpar_cuda_sum_squares. -1 if n is negative.
int64_t tfpar_cuda_scratch_bytes(const tfpar_codec* codec, int64_t n);

// Encodes elements [begin, begin + n) of `x`, those past its end being padding, and writes header and closing padding
// of the payload as well. Arguments as for tfpar_encode, but for
//   norms: two doubles, the sum of squares of x in the range and that of the new residual; NULL if not wanted.
//   scratch: of tfpar_cuda_scratch_bytes(codec, n) bytes; may be NULL if norms is.
int tfpar_cuda_encode(const tfpar_codec* codec, const tfpar_vector* x, int64_t begin, int64_t n, const float* residual,
                      float* new_residual, void* payload, double* norms, void* scratch, void* stream);

// Decodes `peers` payloads of n elements each, sums them, multiplies by a factor and writes element i to element begin
// + i of `out`; what lies past the end of `out` is dropped.
//   factor: used where device_factor, a float in device memory, is NULL.
//   status: set to 1 if a payload is not valid, else left alone; NULL if not wanted.
int tfpar_cuda_decode_sum(const tfpar_codec* codec, int64_t n, const void* const* payloads, int64_t peers, float factor,
                          const float* device_factor, const tfpar_mutable_vector* out, int64_t begin, int32_t* status,
                          void* stream);

// Decodes and sums as above, adds the residual and encodes again. Arguments as for tfpar_recode, and as above;
// norms[0] is that of the scaled sum. `payload` must not overlap the payloads that are read.
int tfpar_cuda_recode(const tfpar_codec* codec, int64_t n, const void* const* payloads, int64_t peers, float factor,
                      const float* device_factor, int64_t valid, int64_t begin, const float* residual,
                      float* new_residual, void* payload, double* norms, void* scratch, int32_t* status, void* stream);

// Writes to `result`, a double in device memory, the sum of squares of elements [begin, end) of x. Not finite exactly
// if one of the elements is not. scratch: of tfpar_cuda_scratch_bytes(NULL, end - begin) bytes.
int tfpar_cuda_sum_squares(const tfpar_vector* x, int64_t begin, int64_t end, double* result, void* scratch,
                           void* stream);

// out[j] = sum over i < count of norms[i][j], as float32, j = 0 and 1: totals of a vector that was encoded in shards.
// Both arrays in device memory.
int tfpar_cuda_finish_norms(const double* norms, int64_t count, float* out, void* stream);

// *norm_squared = *sum as float32; *finite, one byte, says whether the sum is finite. All three in device memory.
int tfpar_cuda_finish_sum(const double* sum, float* norm_squared, void* finite, void* stream);

#ifdef __cplusplus
}
#endif

#endif  // TFPAR_OPS_CORE_CUDA_CODEC_CUDA_H_
