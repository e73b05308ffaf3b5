// The codecs for any processor of the architecture.
#define TFPAR_ISA baseline
#define TFPAR_ISA_NAME "baseline"
#include "kernels/isa_body.h"

namespace tfpar {
const Kernels* BaselineKernels() { return &baseline::kKernels; }
}  // namespace tfpar
