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
  static constexpr float kStart = 0.0f;

  __device__ static float Decode(uint32_t code, uint32_t scale) {
    return Flush(Multiply(FromE4m3(code), FromE4m3ScaleByte(scale)));
  }

  __device__ static bool IsQuick(const uint32_t (&words)[kBits], uint32_t scale) {
    bool nan = false;
#pragma unroll
    for (int k = 0; k < kBits && !kE4m3HalvesHaveNan; ++k) nan |= HasE4m3Nan(words[k]);
    return !nan && (scale == 0 || IsModerate(scale << 23));
  }

  __device__ static void AddQuickly(const uint32_t (&words)[kBits], uint32_t scale, const Layout&, Tile& sum) {
    const float unit = Multiply(Float(scale << 23), 1.0f / kE4m3Halves);
#pragma unroll
    for (int k = 0; k < kTileQuads; ++k) {
      const uint32_t word = words[WordOf(kBits, k, 0)];
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t halves = E4m3ToHalves(i == 0 ? word : word >> 16);
        sum[k][i] = AddProduct(sum[k][i], FromHalf(halves & 0xFFFFu), unit);
        sum[k][i + 1] = AddProduct(sum[k][i + 1], FromHalf(halves >> 16), unit);
      }
    }
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
