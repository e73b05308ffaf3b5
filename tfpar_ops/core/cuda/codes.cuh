// The codes of a thread's 32 elements as words of a payload: the place of each code, and loading and storing the words.
// tile_layout.cuh defines which elements a thread has.
//
// The type of a format (the last column of formats.h; cast.cuh, fp8.cuh, integers.cuh, sign.cuh) defines the rest:
//   kBits    bits of a code: 16, 8, 4, 2 or 1
//   kScale   the type of a block's scale
//   kDenormals   whether a code can stand for a denormal
//   float Decode(uint32_t code, uint32_t scale)   returns d of one element; `scale` is the result of ScaleBits
//   uint32_t Encode<kStochastic>(params, place, v, words)   puts the codes of v into `words`, which must be 0, replaces
//       v by the new residual, and returns the scale for WriteScale. All threads of a codec block call it together.
//
// A format may also define a quicker way to add up payloads; it is what limits the sum of several on a GPU:
//   bool IsQuick(words, scale)   whether AddQuickly has the bits of Add(sum, Decode(...)); true for ordinary payloads
//   void AddQuickly(words, scale, layout, sum)   adds d of each element to `sum`
//   kStart   what a sum starts with: -0, to which any d can be added, or +0 if d is never -0
#ifndef TFPAR_OPS_CORE_CUDA_CODES_CUH_
#define TFPAR_OPS_CORE_CUDA_CODES_CUH_

#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

#include "arithmetic.cuh"
#include "payload.cuh"
#include "tile_layout.cuh"
#include "vector.cuh"

namespace tfpar_cuda {

using tfpar::ScaleType;

template <class Format, typename = void>
constexpr bool kHasQuickSum = false;
template <class Format>
constexpr bool kHasQuickSum<Format, std::void_t<decltype(Format::kStart)>> = true;

// A thread has as many words of codes as a code has bits. Codes of 16 bits are in the order of the elements, narrower
// codes in planes.
__host__ __device__ constexpr bool InOrder(int bits) { return bits == 16; }

// The word, and the bit in it, at which the code of element i of quad k begins.
__host__ __device__ constexpr int WordOf(int bits, int k, int i) { return InOrder(bits) ? 2 * k + i / 2 : k % bits; }
__host__ __device__ constexpr int BitOf(int bits, int k, int i) {
  return InOrder(bits) ? 16 * (i % 2) : 8 * i + bits * (k / bits);
}

template <int kBits>
__device__ inline uint32_t GetCode(const uint32_t (&words)[kBits], int k, int i) {
  return words[WordOf(kBits, k, i)] >> BitOf(kBits, k, i) & ((1u << kBits) - 1u);
}

// The code of element i of quad k, times 2^PlaceOf(...), on top of 2^23: its bits stay where they are and become part of
// the significand of a float. `significand` is Layout's.
constexpr int kUpperCodes = 12;  // bits that codes past the significand are moved down by
__host__ __device__ constexpr bool IsUpper(int bits, int k, int i) { return BitOf(bits, k, i) + bits > 23; }
__host__ __device__ constexpr int PlaceOf(int bits, int k, int i) {
  return BitOf(bits, k, i) - (IsUpper(bits, k, i) ? kUpperCodes : 0);
}

template <int kBits>
__device__ inline float InSignificand(const uint32_t (&words)[kBits], int k, int i, uint32_t significand) {
  const uint32_t word = words[WordOf(kBits, k, i)];
  const uint32_t mask = ((1u << kBits) - 1u) << PlaceOf(kBits, k, i);
  return Float(((IsUpper(kBits, k, i) ? word >> kUpperCodes : word) & mask) | significand);
}

// The bits of the code must be 0 in its word before the call.
template <int kBits>
__device__ inline void PutCode(uint32_t code, int k, int i, uint32_t (&words)[kBits]) {
  words[WordOf(kBits, k, i)] |= code << BitOf(kBits, k, i);
}

template <int kBits>
__device__ inline void StoreWords(uint8_t* block_codes, const Place& place, const uint32_t (&words)[kBits]) {
  if constexpr (InOrder(kBits)) {
    uint8_t* at = block_codes + 8 * place.lane;
    const bool aligned = (reinterpret_cast<uint64_t>(at) & 7u) == 0;
#pragma unroll
    for (int k = 0; k < kBits / 2; ++k) {
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
    for (int k = 0; k < kBits; ++k) {
      *reinterpret_cast<uint32_t*>(block_codes + k * place.quads.stride + 4 * place.lane) = words[k];
    }
  }
}

template <int kBits>
__device__ inline void LoadWords(const uint8_t* block_codes, const Place& place, uint32_t (&words)[kBits]) {
  if constexpr (InOrder(kBits)) {
    const uint8_t* at = block_codes + 8 * place.lane;
    const bool aligned = (reinterpret_cast<uint64_t>(at) & 7u) == 0;
#pragma unroll
    for (int k = 0; k < kBits / 2; ++k) {
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
    for (int k = 0; k < kBits; ++k) {
      words[k] = *reinterpret_cast<const uint32_t*>(block_codes + k * place.quads.stride + 4 * place.lane);
    }
  }
}

// The largest magnitude of a codec block, as bits. Returns it in all threads of the block.
__device__ inline uint32_t LargestMagnitude(const Tile& v, const Place& place) {
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = max(largest, MagnitudeBits(v[k][i]));
  }
  return GroupMax(largest, place);
}

}  // namespace tfpar_cuda

#endif  // TFPAR_OPS_CORE_CUDA_CODES_CUH_
