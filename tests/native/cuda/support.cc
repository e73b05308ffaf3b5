#include "support.h"

#include <algorithm>

namespace support {
namespace {

// The sums over all blocks of the first and of the second norm.
std::vector<double> Totals(const std::vector<double>& norms) {
  std::vector<double> totals(2, 0.0);
  for (size_t i = 0; i < norms.size(); ++i) totals[i % 2] += norms[i];
  return totals;
}

}  // namespace

std::string At(const tfpar_codec& codec, int64_t n, int64_t index) {
  return cases::Name(codec) + ", n " + std::to_string(n) + ", at " + std::to_string(index);
}

std::vector<int64_t> Cuts(cases::Random* random, int64_t size, int64_t count) {
  std::vector<int64_t> cuts;
  for (int64_t i = 0; i < count; ++i) cuts.push_back(random->Below(size + 1));
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

void CheckEncoded(const tfpar_codec& codec, int64_t n, const cases::Encoded& got, const cases::Encoded& expected) {
  const auto byte = std::mismatch(got.payload.begin(), got.payload.end(), expected.payload.begin()).first;
  CHECK(byte == got.payload.end(), "payload byte, " + At(codec, n, byte - got.payload.begin()));
  CHECK(cases::SameBits(got.residual, expected.residual),
        "residual, " + At(codec, n, cases::FirstDifference(got.residual, expected.residual)));
  CHECK(cases::Close(got.norms, Totals(expected.norms)), "norms, " + At(codec, n, -1));
}

}  // namespace support
