// The codecs of one instruction set: a table of functions. codec.cc selects one table for the process.
//
// codec_baseline.cc, codec_v3.cc and codec_v4.cc compile the same sources (kernels/*.h) with different flags, each in
// its own namespace. Those sources use no template of the C++ library: the linker might keep its AVX-512 copy for all
// three.
#ifndef TFPAR_OPS_CORE_KERNELS_H_
#define TFPAR_OPS_CORE_KERNELS_H_

#include "codec.h"
#include "layout.h"

// Where the processor can treat denormals as zeros, codec.cc sets that mode around every call of a kernel, and the
// kernels need no instruction for it. Elsewhere, or with TFPAR_SOFTWARE_FLUSH (for tests), every operation flushes
// denormals in software.
#if !defined(TFPAR_SOFTWARE_FLUSH) && (defined(__x86_64__) || defined(__aarch64__))
#define TFPAR_HARDWARE_FLUSH 1
#else
#define TFPAR_HARDWARE_FLUSH 0
#endif

namespace tfpar {

// All functions expect rounding to nearest and, with TFPAR_HARDWARE_FLUSH, denormals off. Arguments as in codec.h.
struct Kernels {
  const char* name;
  void (*encode)(const tfpar_codec& codec, const tfpar_vector& x, int64_t begin, int64_t n, const float* residual,
                 float* new_residual, void* payload, int64_t first_block, int64_t last_block, double* norms);
  int (*decode_sum)(const tfpar_codec& codec, int64_t n, const void* const* payloads, int64_t peers, float factor,
                    const tfpar_mutable_vector& out, int64_t begin, int64_t first_block, int64_t last_block);
  int (*recode)(const tfpar_codec& codec, int64_t n, const void* const* payloads, int64_t peers, float factor,
                int64_t valid, int64_t begin, const float* residual, float* new_residual, void* payload,
                int64_t first_block, int64_t last_block, double* norms);
  double (*sum_squares)(const tfpar_vector& x, int64_t begin, int64_t end);
  void (*triad)(float a, const float* x, float* y, int64_t n);
};

const Kernels* BaselineKernels();
// Null if the file was not compiled for that instruction set.
const Kernels* V3Kernels();
const Kernels* V4Kernels();

}  // namespace tfpar

#endif  // TFPAR_OPS_CORE_KERNELS_H_
