// Everything that depends on the instruction set. Included by codec_baseline.cc, codec_v3.cc and codec_v4.cc, each of which
// names its namespace in TFPAR_ISA. Only C headers here, see ../kernels.h.
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push  // g++ 12 warns of its own header (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif

#include "../kernels.h"

namespace tfpar {
namespace TFPAR_ISA {
namespace {

#include "arithmetic.h"
// clang-format off: each needs those before it
#include "lanes.h"
#include "block.h"
#include "philox.h"
#define TFPAR_QUOTE(path) #path
#define TFPAR_FORMAT_FILE(name) TFPAR_QUOTE(kernels/name.h)
#include "../formats.h"
#include "dispatch.h"
// clang-format on

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels = {TFPAR_ISA_NAME, Encode, DecodeSum, Recode, SumSquaresOfRange, Triad};

}  // namespace TFPAR_ISA
}  // namespace tfpar
