// One bit per element, and the mean magnitude of a block as its scale.
#ifndef TFPAR_OPS_CORE_CUDA_SIGN_CUH_
#define TFPAR_OPS_CORE_CUDA_SIGN_CUH_

#include <cuda_runtime.h>
#include <stdint.h>

#include "codes.cuh"

namespace tfpar_cuda {

struct Sign {
  static constexpr int kBits = 1;
  static constexpr ScaleType kScale = ScaleType::FLOAT;
  static constexpr bool kDenormals = false;
  static constexpr float kStart = -0.0f;

  __device__ static float Decode(uint32_t code, uint32_t scale) {
    const uint32_t sign = Float(scale) == 0.0f ? 0u : code << 31;
    return Float(scale ^ sign);
  }

  __device__ static bool IsQuick(const uint32_t (&)[kBits], uint32_t scale) { return IsModerate(scale); }

  __device__ static void AddQuickly(const uint32_t (&words)[kBits], uint32_t scale, const Layout& layout, Tile& sum) {
#pragma unroll
    for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (PlaceOf(kBits, k, i) == 0) {  // no place for half a code below it
          sum[k][i] = Add(sum[k][i], Decode(GetCode(words, k, i), scale));
          continue;
        }
        const float unit = static_cast<float>(1u << PlaceOf(kBits, k, i));
        const float half = Subtract(InSignificand(words, k, i, layout.significand), 8388608.0f + 0.5f * unit);
        sum[k][i] = AddProduct(sum[k][i], half, Multiply(Float(scale), -2.0f / unit));
      }
    }
  }

  template <bool kStochastic, typename Params>
  __device__ static uint32_t Encode(const Params& params, const Place& place, Tile& v, uint32_t (&words)[kBits]) {
    const float total = GroupSumOfMagnitudes(v, place);
    const float existing = Existing(place, params.layout.log_block);
    const bool finite = IsFinite(total);
    const float mean = existing == 0.0f ? 0.0f : Multiply(total, __frcp_rn(existing));
    const float scale = finite ? RoundScale(mean, params.layout.scale_bytes) : Nan();
#pragma unroll
    for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool negative = v[k][i] < 0.0f;
        PutCode(negative ? 1u : 0u, k, i, words);
        v[k][i] = Flush(Subtract(v[k][i], negative ? -scale : scale));
      }
    }
    if (!finite) LoadArray(params.residual, place.span, place.quads, v);
    return Bits(scale);
  }

 private:
  // The number of elements of the codec block that exist, as a float32.
  __device__ static float Existing(const Place& place, int log_block) {
    const int64_t left = place.span.limit - (place.block << log_block);
    const int64_t size = static_cast<int64_t>(1) << log_block;
    return static_cast<float>(static_cast<int>(left < 0 ? 0 : left < size ? left : size));
  }
};

}  // namespace tfpar_cuda

#endif  // TFPAR_OPS_CORE_CUDA_SIGN_CUH_
