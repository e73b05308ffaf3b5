// The codecs for x86-64-v3: -mavx2 -mfma -mf16c -mbmi -mbmi2.
#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__BMI2__)
#define TFPAR_ISA v3
#define TFPAR_ISA_NAME "x86-64-v3"
#include "kernels/isa_body.h"

namespace tfpar {
const Kernels* V3Kernels() { return &v3::kKernels; }
}  // namespace tfpar
#else
namespace tfpar {
const Kernels* V3Kernels() { return nullptr; }
}  // namespace tfpar
#endif
