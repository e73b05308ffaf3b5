// What the tests feed to the codecs, and calls of the C ABI on whole std::vectors.
#ifndef TFPAR_TESTS_NATIVE_CASES_H_
#define TFPAR_TESTS_NATIVE_CASES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "oracle.h"

namespace cases {

using oracle::Bytes;
using oracle::Floats;

// Every kind with its default options first (`count` of them), then with others: block and scale sizes, keep, rounding.
std::vector<tfpar_codec> Defaults();
std::vector<tfpar_codec> All();
std::string Name(const tfpar_codec& codec);

// A counter-based generator of its own, so that a failure comes again.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  uint64_t Next();
  int64_t Below(int64_t limit) { return static_cast<int64_t>(Next() % static_cast<uint64_t>(limit)); }
  float Normal();

 private:
  uint64_t state_;
};

// Values whose kind changes every few hundred elements: normal ones of many scales, ties, zeros of both signs, denormals,
// halfway cases of the roundings, the largest floats; with `non_finite`, a NaN or an infinity here and there.
Floats Values(Random* random, int64_t count, bool non_finite);

struct Encoded {
  Bytes payload;
  Floats residual;
  std::vector<double> norms;
};

// x is cut at `cuts` (rising, within it) into parts. Elements [begin, begin + n) are encoded; residual empty for none.
Encoded Encode(const tfpar_codec& codec, const Floats& x, const std::vector<int64_t>& cuts, int64_t begin, int64_t n,
               const Floats& residual);

// The n elements of the sum, written to a vector cut at `cuts`.
Floats DecodeSum(const tfpar_codec& codec, int64_t n, const std::vector<Bytes>& payloads, float factor,
                 const std::vector<int64_t>& cuts, int* status);

Encoded Recode(const tfpar_codec& codec, int64_t n, const std::vector<Bytes>& payloads, float factor, int64_t valid,
               int64_t begin, const Floats& residual);

// The same bits, where any NaN equals any other. The index of the first difference, or -1.
int64_t FirstDifference(const Floats& a, const Floats& b);
// The same bits throughout, NaN included.
bool SameBits(const Floats& a, const Floats& b);
// Float64 sums of the same terms in different orders.
bool Close(const std::vector<double>& a, const std::vector<double>& b);

// A vector cut into parts as the C ABI sees it. Each part is a copy of its own, with nothing readable around it that a
// sanitizer would not notice.
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
