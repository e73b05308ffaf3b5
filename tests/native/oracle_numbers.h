// What the oracle computes with, as FORMAT.md defines it: float32 arithmetic, shorter formats and random numbers.
#ifndef TFPAR_TESTS_NATIVE_ORACLE_NUMBERS_H_
#define TFPAR_TESTS_NATIVE_ORACLE_NUMBERS_H_

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace oracle {

constexpr double kSmallestNormal = 0x1p-126;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

uint32_t Bits(float v);
float FromBits(uint32_t bits);

// Rounds a float64, the exact result of one operation on two float32, to float32: zero if it is denormal after rounding
// to 24 bits.
inline float Round(double exact) {
  if (std::fabs(exact) < kSmallestNormal - 0x1p-151) return std::copysign(0.0f, static_cast<float>(exact));
  if (std::fabs(exact) < kSmallestNormal) return std::copysign(static_cast<float>(kSmallestNormal), static_cast<float>(exact));
  return static_cast<float>(exact);
}

// A denormal operand counts as zero.
inline double In(float v) {
  return std::fabs(static_cast<double>(v)) < kSmallestNormal ? std::copysign(0.0, v) : static_cast<double>(v);
}

// The float64 sum of two float32 may be rounded, but never to the midpoint of two float32, so rounding it again is
// right.
inline float Add(float a, float b) { return Round(In(a) + In(b)); }
inline float Sub(float a, float b) { return Round(In(a) - In(b)); }
inline float Mul(float a, float b) { return Round(In(a) * In(b)); }

// flush(v) of FORMAT.md.
float Flush(float v);

// bf16(v) of FORMAT.md, as its bits.
uint16_t Bf16(float v);
float FromBf16(uint16_t code);

// short(v) of FORMAT.md: a float32 with 17 significant bits.
float Short(float v);

// The magnitudes of all codes of a small float format, in order, from the definition of the format.
std::vector<double> Magnitudes(int exponent_bits, int mantissa_bits, int codes);
const std::vector<double>& HalfMagnitudes();
const std::vector<double>& E4M3Magnitudes();

// The code of the nearest of `values`; ties go to the even code, larger magnitudes to the largest code.
int Nearest(const std::vector<double>& values, double magnitude);

// Four words of Philox4x32-10.
std::vector<uint32_t> Philox(const std::vector<uint32_t>& counter, const std::vector<uint32_t>& key);

}  // namespace oracle

#endif  // TFPAR_TESTS_NATIVE_ORACLE_NUMBERS_H_
