#include "oracle_numbers.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace oracle {

uint32_t Bits(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return bits;
}

float FromBits(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}

float Flush(float v) { return std::fabs(static_cast<double>(v)) < kSmallestNormal ? 0.0f : v; }

uint16_t Bf16(float v) {
  if (!std::isfinite(v)) return 0x7FC0;
  const uint32_t bits = Bits(v);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((rounded & 0x7F80) == 0x7F80 ? (rounded & 0x8000) | 0x7F7F : rounded);
}

float FromBf16(uint16_t code) { return FromBits(static_cast<uint32_t>(code) << 16); }

float Short(float v) {
  const uint32_t bits = (Bits(v) + 0x3F + ((Bits(v) >> 7) & 1)) & ~0x7Fu;
  return FromBits(std::min(bits, 0x7F7FFF80u));
}

std::vector<double> Magnitudes(int exponent_bits, int mantissa_bits, int codes) {
  std::vector<double> values;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  for (int code = 0; code < codes; ++code) {
    const int exponent = code >> mantissa_bits;
    const double mantissa = std::ldexp(code & ((1 << mantissa_bits) - 1), -mantissa_bits);
    values.push_back(exponent == 0 ? std::ldexp(mantissa, 1 - bias) : std::ldexp(1 + mantissa, exponent - bias));
  }
  return values;
}

const std::vector<double>& HalfMagnitudes() {
  static const std::vector<double> values = Magnitudes(5, 10, 0x7C00);
  return values;
}

const std::vector<double>& E4M3Magnitudes() {
  static const std::vector<double> values = Magnitudes(4, 3, 0x7F);
  return values;
}

int Nearest(const std::vector<double>& values, double magnitude) {
  const auto above = std::lower_bound(values.begin(), values.end(), magnitude);
  if (above == values.end()) return static_cast<int>(values.size()) - 1;
  const int high = static_cast<int>(above - values.begin());
  if (high == 0) return 0;
  const double to_low = magnitude - values[high - 1], to_high = values[high] - magnitude;
  if (to_low != to_high) return to_low < to_high ? high - 1 : high;
  return high % 2 == 0 ? high : high - 1;
}

std::vector<uint32_t> Philox(const std::vector<uint32_t>& counter, const std::vector<uint32_t>& key) {
  std::vector<uint32_t> c = counter, k = key;
  for (int round = 0; round < 10; ++round) {
    const uint64_t left = uint64_t{0xD2511F53} * c[0], right = uint64_t{0xCD9E8D57} * c[2];
    c = {static_cast<uint32_t>(right >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(right),
         static_cast<uint32_t>(left >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(left)};
    k = {k[0] + 0x9E3779B9u, k[1] + 0xBB67AE85u};
  }
  return c;
}

}  // namespace oracle
