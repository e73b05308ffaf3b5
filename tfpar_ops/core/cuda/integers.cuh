// Symmetric integers of 8, 4 and 2 bits with a scale per block, nearest or stochastic.
#ifndef TFPAR_OPS_CORE_CUDA_INTEGERS_CUH_
#define TFPAR_OPS_CORE_CUDA_INTEGERS_CUH_

#include <cuda_runtime.h>
#include <stdint.h>

#include "codes.cuh"

namespace tfpar_cuda {

template <int kCodeBits>
struct Integers {
  static constexpr int kBits = kCodeBits;
  static constexpr ScaleType kScale = ScaleType::FLOAT;
  static constexpr bool kDenormals = false;
  static constexpr float kStart = -0.0f;
  static constexpr int32_t kQ = (1 << (kBits - 1)) - 1;  // the largest integer
  // The offset from a signed integer to its code, and a word of codes for 0.
  static constexpr uint32_t kOffset = kBits == 4 ? 8u : kBits == 2 ? 2u : 0u;
  static constexpr uint32_t kZeroWord = kBits == 4 ? 0x88888888u : kBits == 2 ? 0xAAAAAAAAu : 0u;

  __device__ static uint32_t CodeOf(uint32_t integer) { return (integer + kOffset) & ((1u << kBits) - 1u); }

  // Builds the float 2^23 + code from bits and subtracts 2^23 and the offset, which avoids a conversion.
  __device__ static float Decode(uint32_t code, uint32_t scale) {
    const uint32_t shifted = kBits == 8 ? code ^ 0x80u : code;
    const float offset = 8388608.0f + static_cast<float>(kBits == 8 ? 128u : kOffset);
    return Multiply(Subtract(Float(0x4B000000u | shifted), offset), Float(scale));
  }

  __device__ static bool IsQuick(const uint32_t (&)[kBits], uint32_t scale) { return scale == 0 || IsModerate(scale); }

  __device__ static void AddQuickly(const uint32_t (&words)[kBits], uint32_t scale, const Layout& layout, Tile& sum) {
    constexpr uint32_t kFlip = kBits == 8 ? 0x80808080u : 0u;  // from two's complement to an offset
    constexpr uint32_t kShift = kBits == 8 ? 128u : kOffset;
    uint32_t shifted[kBits];
#pragma unroll
    for (int k = 0; k < kBits; ++k) shifted[k] = words[k] ^ kFlip;
#pragma unroll
    for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float unit = static_cast<float>(1u << PlaceOf(kBits, k, i));
        const float integer = Subtract(InSignificand(shifted, k, i, layout.significand), 8388608.0f + kShift * unit);
        sum[k][i] = AddProduct(sum[k][i], integer, Multiply(Float(scale), 1.0f / unit));
      }
    }
  }

  template <bool kStochastic, typename Params>
  __device__ static uint32_t Encode(const Params& params, const Place& place, Tile& v, uint32_t (&words)[kBits]) {
    const uint32_t largest = LargestMagnitude(v, place);
    if (largest > kInfinityBits - 1) {
#pragma unroll
      for (int k = 0; k < kBits; ++k) words[k] = kZeroWord;
      LoadArray(params.residual, place.span, place.quads, v);
      return kNanBits;
    }
    constexpr float kPart = kBits == 8 ? 1.0f / 127.0f : kBits == 4 ? 1.0f / 7.0f : 1.0f;
    const float scale = RoundScale(Multiply(Float(largest), kPart), params.layout.scale_bytes);
    if constexpr (kStochastic) {
      const int log_lanes = params.layout.log_block - 3;
      const uint64_t lane = (static_cast<uint64_t>(params.first_block + place.block) << log_lanes) + 4 * place.lane;
      RoundStochastically(v, scale, lane, params.step, params.seed, words);
    } else {
      RoundToNearest(v, scale, words);
    }
    return Bits(scale);
  }

 private:
  __device__ static void RoundToNearest(Tile& v, float scale, uint32_t (&words)[kBits]) {
    constexpr float kLimit = static_cast<float>(kQ);
    const float inverse = Inverse(scale);
#pragma unroll
    for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float rounded = Add(Multiply(v[k][i], inverse), kRounder);
        const float limited = fminf(fmaxf(rounded, kRounder - kLimit), kRounder + kLimit);
        PutCode(CodeOf(Bits(limited)), k, i, words);
        v[k][i] = Flush(Subtract(v[k][i], Multiply(Subtract(limited, kRounder), scale)));
      }
    }
  }

  // lane: the Philox counter of this thread's first lane, counted from the start of the whole vector.
  __device__ static void RoundStochastically(Tile& v, float scale, uint64_t lane, uint64_t step, uint64_t seed,
                                             uint32_t (&words)[kBits]) {
    const float inverse = Inverse(scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Random random = Philox(lane + i, step, seed);
#pragma unroll
      for (int k = 0; k < kTileQuads; ++k) {
        const int32_t u = static_cast<int32_t>(random.word[k / 2] >> (16 * (k % 2)) & 0xFFFFu);
        const int32_t fixed = __float2int_rn(Multiply(Multiply(v[k][i], inverse), 65536.0f));
        const int32_t q = max(-kQ, min(kQ, (fixed + u) >> 16));
        PutCode(CodeOf(static_cast<uint32_t>(q)), k, i, words);
        v[k][i] = Flush(Subtract(v[k][i], Multiply(SmallIntToFloat(q), scale)));
      }
    }
  }
};

}  // namespace tfpar_cuda

#endif  // TFPAR_OPS_CORE_CUDA_INTEGERS_CUH_
