// Sums of squares: of a vector in parts, and over shards.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "support.h"

using cases::Floats;
using support::Cuts;

TEST(SumOfSquares) {
  cases::Random random(9);
  for (int64_t n : {1, 5, 4096, 4097, 20000}) {
    Floats x = cases::Values(&random, n, false);
    for (int round = 0; round < 2; ++round) {
      const std::vector<int64_t> cuts = Cuts(&random, n, 3);
      const int64_t begin = random.Below(n);
      const cases::Pieces host(x, cuts);
      const device::Pieces pieces(x, cuts);
      const tfpar_vector host_view = host.View(), view = pieces.View();
      const double expected = tfpar_sum_squares(&host_view, begin, n);
      const device::Array<uint8_t> scratch(static_cast<size_t>(tfpar_cuda_scratch_bytes(nullptr, n - begin)), 0xEE);
      device::Array<double> sum(1, -7.0);
      device::Must(tfpar_cuda_sum_squares(&view, begin, n, sum.data(), scratch.data(), nullptr),
                   "tfpar_cuda_sum_squares");
      CHECK(cases::Close(sum.Read(), {expected}), std::to_string(n));

      device::Array<float> squared(1, -7.0f);
      device::Array<uint8_t> finite(1, 7);
      device::Must(tfpar_cuda_finish_sum(sum.data(), squared.data(), finite.data(), nullptr), "tfpar_cuda_finish_sum");
      CHECK(finite.Read()[0] == std::isfinite(expected), std::to_string(n));
      const float got = squared.Read()[0], wanted = static_cast<float>(expected);
      CHECK(got == wanted || std::fabs(got / wanted - 1.0f) < 1e-6f || std::isnan(wanted), std::to_string(n));
      x.back() = INFINITY;  // for the second round
    }
  }
}

TEST(NormsOfShards) {
  std::vector<double> norms;
  double expected[2] = {0.0, 0.0};
  for (int i = 0; i < 5000; ++i) {
    norms.push_back(i);
    expected[i % 2] += i;
  }
  const device::Array<double> shards(norms);
  device::Array<float> out(2, -7.0f);
  device::Must(tfpar_cuda_finish_norms(shards.data(), 2500, out.data(), nullptr), "tfpar_cuda_finish_norms");
  CHECK(out.Read() == (Floats{static_cast<float>(expected[0]), static_cast<float>(expected[1])}), "sums");
}
