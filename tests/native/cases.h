// The inputs of the codec tests, and wrappers that call the C ABI with std::vectors.
#ifndef TFPAR_TESTS_NATIVE_CASES_H_
#define TFPAR_TESTS_NATIVE_CASES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "oracle.h"

namespace cases {

using oracle::Bytes;
using oracle::Floats;

// Defaults: every kind with its default options. All: these, then other block and scale sizes, keep and rounding.
std::vector<tfpar_codec> Defaults();
std::vector<tfpar_codec> All();
std::string Name(const tfpar_codec& codec);

// A generator that depends on the seed alone, so that failures are reproducible.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  uint64_t Next();
  int64_t Below(int64_t limit) { return static_cast<int64_t>(Next() % static_cast<uint64_t>(limit)); }
  float Normal();

 private:
  uint64_t state_;
};

// Values whose pattern changes every few hundred elements: normal numbers of many scales, equal values, zeros of both
// signs, denormals, halfway cases of the roundings, the largest floats; with `non_finite`, also some NaN and
// infinities.
Floats Values(Random* random, int64_t count, bool non_finite);

struct Encoded {
  Bytes payload;
  Floats residual;
  std::vector<double> norms;
};

// Cuts x into parts at `cuts` (rising, within x) and encodes elements [begin, begin + n). An empty residual stands for
// none.
Encoded Encode(const tfpar_codec& codec, const Floats& x, const std::vector<int64_t>& cuts, int64_t begin, int64_t n,
               const Floats& residual);

// The n elements of the sum, written to a vector cut at `cuts`.
Floats DecodeSum(const tfpar_codec& codec, int64_t n, const std::vector<Bytes>& payloads, float factor,
                 const std::vector<int64_t>& cuts, int* status);

Encoded Recode(const tfpar_codec& codec, int64_t n, const std::vector<Bytes>& payloads, float factor, int64_t valid,
               int64_t begin, const Floats& residual);

// Compares bits, but all NaN are equal. Returns the index of the first difference, or -1.
int64_t FirstDifference(const Floats& a, const Floats& b);
// Whether all bits are the same, also those of NaN.
bool SameBits(const Floats& a, const Floats& b);
// Whether a and b are equal up to rounding: float64 sums of the same terms in different orders.
bool Close(const std::vector<double>& a, const std::vector<double>& b);

// A vector cut into parts, as the C ABI takes it. Each part is a separate allocation, so that a sanitizer detects
// accesses outside of it.
class Pieces {
 public:
  Pieces(const Floats& values, const std::vector<int64_t>& cuts);
  tfpar_vector View() const { return {read_.data(), offset_.data(), static_cast<int64_t>(read_.size())}; }
  tfpar_mutable_vector MutableView() { return {write_.data(), offset_.data(), static_cast<int64_t>(write_.size())}; }
  Floats Joined() const;

 private:
  std::vector<Floats> parts_;
  std::vector<const float*> read_;
  std::vector<float*> write_;
  std::vector<int64_t> offset_;
};

}  // namespace cases

#endif  // TFPAR_TESTS_NATIVE_CASES_H_
