// The codecs for x86-64-v4: the flags of v3 and -mavx512f -mavx512bw -mavx512cd -mavx512dq -mavx512vl
// -mprefer-vector-width=512.
#include "kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512CD__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__BMI2__)
#define TFPAR_ISA v4
#define TFPAR_ISA_NAME "x86-64-v4"
#include "kernels/isa_body.h"

namespace tfpar {
const Kernels* V4Kernels() { return &v4::kKernels; }
}  // namespace tfpar
#else
namespace tfpar {
const Kernels* V4Kernels() { return nullptr; }
}  // namespace tfpar
#endif
