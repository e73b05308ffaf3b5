// Everything that depends on the instruction set. codec_baseline.cc, codec_v3.cc and codec_v4.cc include this file and
// define their namespace as TFPAR_ISA. It includes only C headers; ../kernels.h says why.
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push  // g++ 12 warns about its own header (GCC bug 105593)
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
// clang-format off: each header needs the ones before it
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
