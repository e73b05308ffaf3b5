// bf16 and fp16: each element is encoded independently.
#ifndef TFPAR_OPS_CORE_CUDA_CAST_CUH_
#define TFPAR_OPS_CORE_CUDA_CAST_CUH_

#include <cuda_runtime.h>
#include <stdint.h>

#include "codes.cuh"

namespace tfpar_cuda {

struct Bf16 {
  static constexpr bool kDenormals = true;
  __device__ static uint32_t Code(float v) { return ToBf16(v); }
  __device__ static float Value(uint32_t code) { return FromBf16(code); }
};

struct Fp16 {
  static constexpr bool kDenormals = false;
  __device__ static uint32_t Code(float v) { return ToHalf(v); }
  __device__ static float Value(uint32_t code) { return FromHalf(code); }
};

template <class Element>
struct Cast {
  static constexpr int kBits = 16;
  static constexpr ScaleType kScale = ScaleType::NONE;
  static constexpr bool kDenormals = Element::kDenormals;

  __device__ static float Decode(uint32_t code, uint32_t) { return Element::Value(code); }

  // An element that is not finite also becomes NaN in v. Its old residual is then read from memory again: that is rare,
  // and saves the registers to hold it.
  template <bool kStochastic, typename Params>
  __device__ static uint32_t Encode(const Params& params, const Place& place, Tile& v, uint32_t (&words)[kBits]) {
    bool finite = true;
#pragma unroll
    for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t code = Element::Code(v[k][i]);
        finite &= IsFinite(v[k][i]);
        PutCode(code, k, i, words);
        v[k][i] = Flush(Subtract(v[k][i], Element::Value(code)));
      }
    }
    if (finite) return 0;
    Tile residual;
    LoadArray(params.residual, place.span, place.quads, residual);
#pragma unroll
    for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[k][i] = IsFinite(v[k][i]) ? v[k][i] : residual[k][i];
    }
    return 0;
  }
};

}  // namespace tfpar_cuda

#endif  // TFPAR_OPS_CORE_CUDA_CAST_CUH_
