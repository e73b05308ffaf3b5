// Codes of all formats but topk: 32 elements of a thread to words of a payload, and back. Their places are those of tile.cuh.
#ifndef TFPAR_OPS_CORE_CUDA_CODES_CUH_
#define TFPAR_OPS_CORE_CUDA_CODES_CUH_

#include <cuda_runtime.h>
#include <stdint.h>

#include "arithmetic.cuh"
#include "payload.cuh"
#include "tile.cuh"

namespace tfpar_cuda {

// Numbers of the payload header, as FormatNumber in layout.h gives them; all others are topk.
enum Format { kBf16 = 1, kHalf = 2, kFp8 = 3, kInt8 = 4, kInt4 = 5, kInt2 = 6, kSign = 7 };

__host__ __device__ constexpr int CodeBits(int format) {
  return format <= kHalf ? 16 : format <= kInt8 ? 8 : format == kInt4 ? 4 : format == kInt2 ? 2 : 1;
}

// Words of codes that a thread has: 32 codes of as many bits.
__host__ __device__ constexpr int CodeWords(int format) { return CodeBits(format); }

__host__ __device__ constexpr bool IsCast(int format) { return format <= kHalf; }
__host__ __device__ constexpr bool IsInteger(int format) { return format >= kInt8 && format <= kInt2; }

// How the code of element i of quad k is found: word and bit.
template <int kFormat>
__host__ __device__ constexpr int WordOf(int k, int i) {
  return IsCast(kFormat) ? 2 * k + i / 2 : k % CodeBits(kFormat);
}

template <int kFormat>
__host__ __device__ constexpr int BitOf(int k, int i) {
  return IsCast(kFormat) ? 16 * (i % 2) : 8 * i + CodeBits(kFormat) * (k / CodeBits(kFormat));
}

// What is added to a signed integer to make its code, and a word of codes of 0.
template <int kFormat>
__host__ __device__ constexpr uint32_t IntegerOffset() {
  return kFormat == kInt4 ? 8u : kFormat == kInt2 ? 2u : 0u;
}

template <int kFormat>
__host__ __device__ constexpr uint32_t ZeroWord() {
  return kFormat == kInt4 ? 0x88888888u : kFormat == kInt2 ? 0xAAAAAAAAu : 0u;
}

// ---- Words in memory ----

template <int kFormat>
__device__ inline void StoreWords(uint8_t* block_codes, const Place& place,
                                  const uint32_t (&words)[CodeWords(kFormat)]) {
  if constexpr (IsCast(kFormat)) {
    uint8_t* at = block_codes + 8 * place.lane;
    const bool aligned = (reinterpret_cast<uint64_t>(at) & 7u) == 0;
#pragma unroll
    for (int k = 0; k < CodeWords(kFormat) / 2; ++k) {
      uint32_t* quad = reinterpret_cast<uint32_t*>(at + 2 * k * place.quads.stride);
      if (aligned) {
        __stwb(reinterpret_cast<uint2*>(quad), make_uint2(words[2 * k], words[2 * k + 1]));
      } else {
        quad[0] = words[2 * k];
        quad[1] = words[2 * k + 1];
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < CodeWords(kFormat); ++k) {
      *reinterpret_cast<uint32_t*>(block_codes + k * place.quads.stride + 4 * place.lane) = words[k];
    }
  }
}

template <int kFormat>
__device__ inline void LoadWords(const uint8_t* block_codes, const Place& place,
                                 uint32_t (&words)[CodeWords(kFormat)]) {
  if constexpr (IsCast(kFormat)) {
    const uint8_t* at = block_codes + 8 * place.lane;
    const bool aligned = (reinterpret_cast<uint64_t>(at) & 7u) == 0;
#pragma unroll
    for (int k = 0; k < CodeWords(kFormat) / 2; ++k) {
      const uint32_t* quad = reinterpret_cast<const uint32_t*>(at + 2 * k * place.quads.stride);
      if (aligned) {
        const uint2 pair = *reinterpret_cast<const uint2*>(quad);
        words[2 * k] = pair.x;
        words[2 * k + 1] = pair.y;
      } else {
        words[2 * k] = quad[0];
        words[2 * k + 1] = quad[1];
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < CodeWords(kFormat); ++k) {
      words[k] = *reinterpret_cast<const uint32_t*>(block_codes + k * place.quads.stride + 4 * place.lane);
    }
  }
}

// ---- Decoding ----

// d of one element, given its thread's words and its block's scale as ScaleBits returns it.
template <int kFormat>
__device__ inline float Decode(const uint32_t (&words)[CodeWords(kFormat)], uint32_t scale, int k, int i) {
  constexpr uint32_t kMask = (1u << CodeBits(kFormat)) - 1u;
  const uint32_t code = words[WordOf<kFormat>(k, i)] >> BitOf<kFormat>(k, i) & kMask;
  if (kFormat == kBf16) return FromBf16(code);
  if (kFormat == kHalf) return FromHalf(code);
  if (kFormat == kFp8) return Flush(Multiply(FromE4m3(code), FromE4m3ScaleByte(scale)));
  if (kFormat == kSign) {
    const uint32_t sign = Float(scale) == 0.0f ? 0u : code << 31;
    return Float(scale ^ sign);
  }
  // 2^23 + code, less what makes it the integer: no conversion.
  const uint32_t shifted = kFormat == kInt8 ? code ^ 0x80u : code;
  const float offset = 8388608.0f + static_cast<float>(kFormat == kInt8 ? 128u : IntegerOffset<kFormat>());
  return Multiply(Subtract(Float(0x4B000000u | shifted), offset), Float(scale));
}

// ---- Encoding: v becomes the new residual. The block is finite (casts: see EncodeCast). ----

template <int kFormat>
__device__ inline void EncodeIntegers(Tile& v, float scale, uint32_t (&words)[CodeWords(kFormat)]) {
  constexpr float kLimit = static_cast<float>((1 << (CodeBits(kFormat) - 1)) - 1);
  const float inverse = Inverse(scale);
#pragma unroll
  for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float rounded = Add(Multiply(v[k][i], inverse), kRounder);
      const float limited = fminf(fmaxf(rounded, kRounder - kLimit), kRounder + kLimit);
      const uint32_t code = (Bits(limited) + IntegerOffset<kFormat>()) & ((1u << CodeBits(kFormat)) - 1u);
      words[WordOf<kFormat>(k, i)] |= code << BitOf<kFormat>(k, i);
      v[k][i] = Flush(Subtract(v[k][i], Multiply(Subtract(limited, kRounder), scale)));
    }
  }
}

// lane: the Philox counter of this thread's first lane, counted from the start of the whole vector.
template <int kFormat>
__device__ inline void EncodeStochastic(Tile& v, float scale, uint64_t lane, uint64_t step, uint64_t seed,
                                        uint32_t (&words)[CodeWords(kFormat)]) {
  constexpr int32_t kLimit = (1 << (CodeBits(kFormat) - 1)) - 1;
  const float inverse = Inverse(scale);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Random random = Philox(lane + i, step, seed);
#pragma unroll
    for (int k = 0; k < kTileQuads; ++k) {
      const int32_t u = static_cast<int32_t>(random.word[k / 2] >> (16 * (k % 2)) & 0xFFFFu);
      const int32_t fixed = __float2int_rn(Multiply(Multiply(v[k][i], inverse), 65536.0f));
      const int32_t q = max(-kLimit, min(kLimit, (fixed + u) >> 16));
      const uint32_t code = (static_cast<uint32_t>(q) + IntegerOffset<kFormat>()) & ((1u << CodeBits(kFormat)) - 1u);
      words[WordOf<kFormat>(k, i)] |= code << BitOf<kFormat>(k, i);
      v[k][i] = Flush(Subtract(v[k][i], Multiply(SmallIntToFloat(q), scale)));
    }
  }
}

__device__ inline void EncodeSigns(Tile& v, float scale, uint32_t (&words)[1]) {
#pragma unroll
  for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool negative = v[k][i] < 0.0f;
      words[0] |= (negative ? 1u : 0u) << BitOf<kSign>(k, i);
      v[k][i] = Flush(Subtract(v[k][i], negative ? -scale : scale));
    }
  }
}

__device__ inline void EncodeFp8(Tile& v, uint32_t scale_byte, uint32_t (&words)[8]) {
  const float scale = FromE4m3ScaleByte(scale_byte);
  const float inverse = scale_byte == 0 ? 0.0f : Float((254u - scale_byte) << 23);
#pragma unroll
  for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t code = ToE4m3(Multiply(v[k][i], inverse));
      words[WordOf<kFp8>(k, i)] |= code << BitOf<kFp8>(k, i);
      v[k][i] = Flush(Subtract(v[k][i], Flush(Multiply(FromE4m3(code), scale))));
    }
  }
}

// Elements that are not finite become NaN in v as well; returns whether there are any.
template <int kFormat>
__device__ inline bool EncodeCast(Tile& v, uint32_t (&words)[CodeWords(kFormat)]) {
  bool finite = true;
#pragma unroll
  for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t code = kFormat == kBf16 ? ToBf16(v[k][i]) : ToHalf(v[k][i]);
      const float decoded = kFormat == kBf16 ? FromBf16(code) : FromHalf(code);
      finite &= IsFinite(v[k][i]);
      words[WordOf<kFormat>(k, i)] |= code << BitOf<kFormat>(k, i);
      v[k][i] = Flush(Subtract(v[k][i], decoded));
    }
  }
  return !finite;
}

}  // namespace tfpar_cuda

#endif  // TFPAR_OPS_CORE_CUDA_CODES_CUH_
