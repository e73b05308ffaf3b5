// fp8 (E4M3) with a power of two as the scale of each block.
#ifndef TFPAR_OPS_CORE_CUDA_FP8_CUH_
#define TFPAR_OPS_CORE_CUDA_FP8_CUH_

#include <cuda_runtime.h>
#include <stdint.h>

#include "codes.cuh"

namespace tfpar_cuda {

struct Fp8 {
  static constexpr int kBits = 8;
  static constexpr ScaleType kScale = ScaleType::BYTE;
  static constexpr bool kDenormals = false;

  __device__ static float Decode(uint32_t code, uint32_t scale) {
    return Flush(Multiply(FromE4m3(code), FromE4m3ScaleByte(scale)));
  }

  template <bool kStochastic, typename Params>
  __device__ static uint32_t Encode(const Params& params, const Place& place, Tile& v, uint32_t (&words)[kBits]) {
    const uint32_t largest = LargestMagnitude(v, place);
    if (largest > kLargestE4m3Bits) {
      LoadArray(params.residual, place.span, place.quads, v);
      return 255u;
    }
    const uint32_t scale_byte = largest == 0 ? 0u : E4m3ScaleByte(largest);
    const float scale = FromE4m3ScaleByte(scale_byte);
    const float inverse = scale_byte == 0 ? 0.0f : Float((254u - scale_byte) << 23);
#pragma unroll
    for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t code = ToE4m3(Multiply(v[k][i], inverse));
        PutCode(code, k, i, words);
        v[k][i] = Flush(Subtract(v[k][i], Flush(Multiply(FromE4m3(code), scale))));
      }
    }
    return scale_byte;
  }
};

}  // namespace tfpar_cuda

#endif  // TFPAR_OPS_CORE_CUDA_FP8_CUH_
