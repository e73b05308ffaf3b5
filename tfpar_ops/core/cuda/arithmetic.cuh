// The float32 arithmetic of FORMAT.md on one element. Compile with -ftz=true; sums and products go through intrinsics
// that the compiler never fuses, so that -fmad does not matter.
#ifndef TFPAR_OPS_CORE_CUDA_ARITHMETIC_CUH_
#define TFPAR_OPS_CORE_CUDA_ARITHMETIC_CUH_

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace tfpar_cuda {

constexpr uint32_t kInfinityBits = 0x7F800000u;
constexpr uint32_t kTinyBits = 0x00800000u;  // 2^-126
constexpr uint32_t kNanBits = 0x7FC00000u;

__device__ inline uint32_t Bits(float v) { return __float_as_uint(v); }
__device__ inline float Float(uint32_t bits) { return __uint_as_float(bits); }
__device__ inline uint32_t MagnitudeBits(float v) { return Bits(v) & 0x7FFFFFFFu; }
__device__ inline bool IsFinite(float v) { return MagnitudeBits(v) < kInfinityBits; }
__device__ inline float Nan() { return Float(kNanBits); }

__device__ inline float Add(float a, float b) { return __fadd_rn(a, b); }
__device__ inline float Subtract(float a, float b) { return __fsub_rn(a, b); }
__device__ inline float Multiply(float a, float b) { return __fmul_rn(a, b); }

// a * b + sum, rounded once. Has the bits of Add(sum, Multiply(a, b)) only where the product is exact.
__device__ inline float AddProduct(float sum, float a, float b) { return __fmaf_rn(a, b, sum); }

// With -ftz=true a sum drops denormals, and adding +0 turns -0 into +0.
__device__ inline float Flush(float v) { return Add(v, 0.0f); }

// Whether a scale is far enough from the limits of float32 that no product with a code over- or underflows, and has few
// enough significant bits, 17, that all of them are exact. Every scale that an encoder writes for ordinary gradients is.
__device__ inline bool IsModerate(uint32_t scale_bits) {
  return (scale_bits & 0x7FFFFFFFu) - (27u << 23) < (200u << 23) && (scale_bits & 0x7Fu) == 0;
}

// scaled(sum) of FORMAT.md; its section "Sums of payloads" says why 2^-126 itself becomes 0.
__device__ inline float Scaled(float sum, float factor) {
  const float product = Multiply(sum, factor);
  return fabsf(product) <= Float(kTinyBits) ? 0.0f : product;
}

// Adding 1.5 * 2^23 rounds |v| < 2^22 to the nearest integer, ties to even, and leaves it in the low bits. That takes
// two full-rate instructions; conversions between float and integer run at a quarter of that rate.
constexpr float kRounder = 12582912.0f;
constexpr uint32_t kRounderBits = 0x4B400000u;

__device__ inline float SmallIntToFloat(int32_t q) {
  return Subtract(Float(kRounderBits + static_cast<uint32_t>(q)), kRounder);
}

// ---- bfloat16, half, scales ----

__device__ inline uint32_t ToBf16(float v) {
  if (!IsFinite(v)) return 0x7FC0u;
  const uint32_t bits = Bits(v);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return (rounded & 0x7FFFu) == 0x7F80u ? rounded - 1u : rounded;
}

__device__ inline float FromBf16(uint32_t code) { return Float(code << 16); }

__device__ inline uint32_t ToHalf(float v) {
  if (!IsFinite(v)) return 0x7E00u;
  return __half_as_ushort(__float2half_rn(fminf(fmaxf(v, -65504.0f), 65504.0f)));
}

__device__ inline float FromHalf(uint32_t code) { return __half2float(__ushort_as_half(static_cast<uint16_t>(code))); }

// The scale for s >= 0, rounded to what `bytes` bytes (2 or 4) store.
__device__ inline float RoundScale(float s, int bytes) {
  const uint32_t bits = Bits(s);
  const uint32_t rounded =
      bytes == 2 ? (bits + 0x7FFFu + ((bits >> 16) & 1u)) & ~0xFFFFu : (bits + 0x3Fu + ((bits >> 7) & 1u)) & ~0x7Fu;
  if (rounded <= kTinyBits) return 0.0f;
  return Float(min(rounded, 0x7E800000u));  // at most 2^126, so that 1 / scale is not denormal
}

__device__ inline float Inverse(float scale) { return scale == 0.0f ? 0.0f : __frcp_rn(scale); }

// ---- E4M3 ----

// The code of t; |t| must be at most 448.
__device__ inline uint32_t ToE4m3(float t) {
  const uint32_t bits = MagnitudeBits(t);
  uint32_t code;
  if (bits < 0x3C800000u) {  // below 2^-6, the least normal number
    code = Bits(Add(Multiply(Float(bits), 512.0f), kRounder)) & 0xFFu;
  } else {
    code = ((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
  }
  return code == 0 ? 0 : code | (Bits(t) >> 31 << 7);
}

__device__ inline float FromE4m3(uint32_t code) {
  const uint32_t magnitude = code & 0x7Fu;
  // A denormal m * 2^-9 is (1 + m / 8) * 2^-6 - 2^-6.
  const bool denormal = magnitude < 8u;
  float v = Float((magnitude << 20) + ((denormal ? 121u : 120u) << 23));
  if (denormal) v = Subtract(v, 0.015625f);
  if (magnitude == 0x7Fu) v = Nan();
  return Float(Bits(v) | (code >> 7 << 31));
}

// 448 * 2^119: a larger magnitude would decode to infinity, and counts as not finite.
constexpr uint32_t kLargestE4m3Bits = 0x7F600000u;

// e + 127 for the power of two 2^e that scales a block whose largest magnitude has these bits (neither zero nor
// infinite).
__device__ inline uint32_t E4m3ScaleByte(uint32_t magnitude_bits) {
  const int32_t byte = static_cast<int32_t>(magnitude_bits >> 23) - 8 + ((magnitude_bits & 0x7FFFFFu) > 0x600000u);
  return static_cast<uint32_t>(max(byte, 1));
}

// The codes in the lower two bytes of a word as two halves, which are kE4m3Halves times their values.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr float kE4m3Halves = 1.0f;
constexpr bool kE4m3HalvesHaveNan = true;

__device__ inline uint32_t E4m3ToHalves(uint32_t word) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(word)));
  return halves;
}
#else
// Sign, exponent and significand move to their places in a half, whose exponent has 8 more as its bias. A half with this
// exponent and significand would not be NaN.
constexpr float kE4m3Halves = 0.00390625f;
constexpr bool kE4m3HalvesHaveNan = false;

__device__ inline uint32_t E4m3ToHalves(uint32_t word) {
  const uint32_t high = (word & 0xFFu) << 8 | (word & 0xFF00u) << 16;
  return (high & 0x80008000u) | (high & 0x7F007F00u) >> 1;
}
#endif

// Whether one of the four codes in a word is NaN.
__device__ inline bool HasE4m3Nan(uint32_t word) { return (((word & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u) != 0; }

__device__ inline float FromE4m3ScaleByte(uint32_t byte) { return byte == 255u ? Nan() : Float(byte << 23); }

// ---- Philox4x32-10 ----

struct Random {
  uint32_t word[4];
};

__device__ inline Random Philox(uint64_t counter, uint64_t step, uint64_t seed) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
  uint32_t c2 = static_cast<uint32_t>(step), c3 = static_cast<uint32_t>(step >> 32);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const uint32_t high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace tfpar_cuda

#endif  // TFPAR_OPS_CORE_CUDA_ARITHMETIC_CUH_
