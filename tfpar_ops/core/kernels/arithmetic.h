// float32 arithmetic as FORMAT.md defines it: rounded to nearest, denormals are zero, nothing fused.

// Iterations of the loop are independent, although pointers in it may be equal (residual and new residual).
#if defined(__clang__)
#define TFPAR_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define TFPAR_UNROLL_PLANES _Pragma("clang loop unroll(full)")
#else
#define TFPAR_INDEPENDENT _Pragma("GCC ivdep")
#define TFPAR_UNROLL_PLANES _Pragma("GCC unroll 8")
#endif
#define TFPAR_INLINE inline __attribute__((always_inline))

// Integers that may alias memory of any type at any alignment: payloads are bytes.
typedef uint16_t __attribute__((aligned(1), may_alias)) AnyU16;
typedef uint32_t __attribute__((aligned(1), may_alias)) AnyU32;

constexpr uint32_t kSignBit = 0x80000000u;
constexpr uint32_t kInfinity = 0x7F800000u;
constexpr uint32_t kNaN = 0x7FC00000u;
constexpr uint32_t kSmallestNormal = 0x00800000u;

TFPAR_INLINE uint32_t Bits(float v) {
  uint32_t bits;
  __builtin_memcpy(&bits, &v, 4);
  return bits;
}

TFPAR_INLINE float Float(uint32_t bits) {
  float v;
  __builtin_memcpy(&v, &bits, 4);
  return v;
}

TFPAR_INLINE uint32_t Magnitude(float v) { return Bits(v) & ~kSignBit; }

// A denormal becomes a zero of its sign. In the mode that codec.cc sets, the processor does this itself.
TFPAR_INLINE float DropDenormal(float v) {
#if TFPAR_HARDWARE_FLUSH
  return v;
#else
  return Float(Bits(v) & (Magnitude(v) < kSmallestNormal ? kSignBit : ~0u));
#endif
}

TFPAR_INLINE float Add(float a, float b) { return DropDenormal(DropDenormal(a) + DropDenormal(b)); }
TFPAR_INLINE float Sub(float a, float b) { return DropDenormal(DropDenormal(a) - DropDenormal(b)); }
TFPAR_INLINE float Mul(float a, float b) { return DropDenormal(DropDenormal(a) * DropDenormal(b)); }

// flush: adding +0 turns -0 (and, with denormals off, every denormal) into +0.
TFPAR_INLINE float Flush(float v) { return DropDenormal(v) + 0.0f; }

// The nearest integer to v, ties to even, for |v| < 2^22, as a float. The sum with 1.5 * 2^23 has no room for a
// fraction.
constexpr float kRoundingMagic = 12582912.0f;
TFPAR_INLINE float RoundToInteger(float v) { return (v + kRoundingMagic) - kRoundingMagic; }

// bf16(v) in the upper half of the result; v is not NaN. Infinity would saturate to the largest finite value, but
// callers rule it out first.
TFPAR_INLINE uint32_t RoundToBf16(float v) {
  const uint32_t magnitude = Magnitude(v);
  uint32_t rounded = (magnitude + 0x7FFFu + ((magnitude >> 16) & 1u)) & 0xFFFF0000u;
  rounded = rounded < 0x7F7F0000u ? rounded : 0x7F7F0000u;
  return rounded | (Bits(v) & kSignBit);
}

// short(v) for a finite v that is not negative.
TFPAR_INLINE uint32_t RoundToShort(float v) {
  const uint32_t rounded = (Bits(v) + 0x3Fu + ((Bits(v) >> 7) & 1u)) & ~0x7Fu;
  return rounded < 0x7F7FFF80u ? rounded : 0x7F7FFF80u;
}
