// Compares the kernels with the oracle, bit for bit.
#include <algorithm>
#include <cstdlib>
#include <string>

#include "cases.h"
#include "check.h"
#include "oracle_numbers.h"

namespace {

using cases::Bytes;
using cases::Floats;

// Sanitizers are slow: TFPAR_TEST_STRIDE=16 takes every 16th length.
int64_t Stride() {
  const char* stride = std::getenv("TFPAR_TEST_STRIDE");
  return stride == nullptr ? 1 : std::max(1, std::atoi(stride));
}

std::string At(const tfpar_codec& codec, int64_t n, int64_t index) {
  return cases::Name(codec) + ", n " + std::to_string(n) + ", at " + std::to_string(index);
}

int64_t FirstDifference(const Bytes& a, const Bytes& b) {
  if (a.size() != b.size()) return static_cast<int64_t>(std::min(a.size(), b.size()));
  const auto place = std::mismatch(a.begin(), a.end(), b.begin());
  return place.first == a.end() ? -1 : place.first - a.begin();
}

void CheckEncoded(const tfpar_codec& codec, int64_t n, const cases::Encoded& got, const oracle::Encoded& expected) {
  const int64_t byte = FirstDifference(got.payload, expected.payload);
  CHECK(byte == -1, "payload byte, " + At(codec, n, byte));
  const int64_t element = cases::FirstDifference(got.residual, expected.residual);
  CHECK(element == -1, "residual, " + At(codec, n, element));
  CHECK(cases::Close(got.norms, expected.norms), "norms, " + At(codec, n, -1));
}

// Encodes, decodes and re-encodes n elements, each against the oracle.
void CheckLength(const tfpar_codec& codec, int64_t n, cases::Random* random, int peers) {
  const bool with_residual = random->Below(4) != 0;
  std::vector<Bytes> payloads;
  for (int peer = 0; peer < peers; ++peer) {
    const Floats x = cases::Values(random, n, random->Below(3) == 0);
    const Floats residual = with_residual ? cases::Values(random, n, random->Below(6) == 0) : Floats();
    const auto expected = oracle::Encode(codec, x, residual, 0, n);
    CheckEncoded(codec, n, cases::Encode(codec, x, {}, 0, n, residual), expected);
    payloads.push_back(expected.payload);
  }
  const float factor = random->Below(2) ? 1.0f : 1.0f / static_cast<float>(peers);
  bool invalid = false;
  int status = 0;
  const Floats sum = oracle::DecodeSum(codec, n, payloads, factor, &invalid);
  const int64_t element = cases::FirstDifference(cases::DecodeSum(codec, n, payloads, factor, {}, &status), sum);
  CHECK(element == -1, "sum, " + At(codec, n, element));
  CHECK(status == 0 && !invalid, "positions, " + At(codec, n, -1));
  const int64_t valid = n - (n > 0 && random->Below(3) == 0 ? random->Below(n) : 0);
  const int64_t begin = codec.block * random->Below(100);
  const Floats residual = with_residual ? cases::Values(random, valid, false) : Floats();
  const Floats scaled(sum.begin(), sum.begin() + valid);
  CheckEncoded(codec, n, cases::Recode(codec, n, payloads, factor, valid, begin, residual),
               oracle::Encode(codec, scaled, residual, begin, n));
}

}  // namespace

TEST(EveryLengthWithDefaultOptions) {
  for (const tfpar_codec& codec : cases::Defaults()) {
    cases::Random random(static_cast<uint64_t>(codec.kind * 16 + codec.stochastic));
    for (int64_t n = 0; n <= 4100; n += Stride()) CheckLength(codec, n, &random, n % 16 == 0 ? 2 : 1);
  }
}

TEST(EveryOptionWithSomeLengths) {
  uint64_t seed = 100;
  for (const tfpar_codec& codec : cases::All()) {
    cases::Random random(++seed);
    for (int64_t n : {1, 63, 64, 65, 1000, 4095, 4096, 4097, 20000}) {
      CheckLength(codec, n + random.Below(3), &random, 1 + static_cast<int>(random.Below(3)));
    }
    CheckLength(codec, random.Below(40000), &random, 2);
  }
}

TEST(EveryNumberOfPeers) {
  cases::Random random(7);
  for (const tfpar_codec& codec : cases::Defaults()) {
    for (int peers = 1; peers <= 11; ++peers) CheckLength(codec, 1 + random.Below(5000), &random, peers);
  }
}

// Payloads that no encoder writes: random bytes after a valid header.
TEST(HostilePayloads) {
  cases::Random random(8);
  for (const tfpar_codec& codec : cases::All()) {
    for (int round = 0; round < 6; ++round) {
      const int64_t n = 1 + random.Below(9000);
      std::vector<Bytes> payloads;
      for (int peer = 0; peer <= round; ++peer) {
        Bytes payload(static_cast<size_t>(tfpar_payload_bytes(&codec, n)));
        for (uint8_t& byte : payload) byte = static_cast<uint8_t>(random.Next());
        const bool small_positions = codec.kind == TFPAR_TOPK && round % 2 == 0;
        if (small_positions) {
          for (size_t i = 17; i < payload.size(); i += 2) payload[i] &= static_cast<uint8_t>((codec.block - 1) >> 8);
          for (size_t i = 16; i < payload.size(); i += 2) payload[i] &= static_cast<uint8_t>(codec.block - 1);
        }
        tfpar_write_frame(&codec, n, payload.data());
        payloads.push_back(payload);
      }
      bool invalid = false;
      int status = 0;
      const Floats expected = oracle::DecodeSum(codec, n, payloads, 0.5f, &invalid);
      const int64_t element = cases::FirstDifference(cases::DecodeSum(codec, n, payloads, 0.5f, {}, &status), expected);
      CHECK(element == -1, "sum, " + At(codec, n, element));
      CHECK((status != 0) == invalid, "positions, " + At(codec, n, -1));
    }
  }
}

// Compares the oracle's generator with the known answers that are published with Random123.
TEST(PhiloxKnownAnswers) {
  using Words = std::vector<uint32_t>;
  CHECK(oracle::Philox({0, 0, 0, 0}, {0, 0}) == (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}), "zeros");
  CHECK(oracle::Philox({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}) == (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}), "ones");
  CHECK(oracle::Philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}),
        "pi");
}

// A payload written by hand from FORMAT.md, in case the oracle and the kernels have the same error.
TEST(PayloadByHand) {
  const tfpar_codec codec = {TFPAR_INT4, 64, 0, 16, 0, 0, 0};
  Floats x(65, 0.0f);
  x[0] = 7.0f;    // scale 1 (7 / 7), q = 7, code 15
  x[1] = -2.5f;   // ties to even: q = -2, code 6, residual -0.5
  x[33] = 3.0f;   // in the upper half of byte 1: code 11
  const auto got = cases::Encode(codec, x, {}, 0, 65, {});
  Bytes expected(96, 0);
  const uint8_t header[] = {0x54, 0x46, 0x50, 0x01, 5, 6, 0, 0, 65, 0, 0, 0, 0, 0, 0, 0};
  std::copy(std::begin(header), std::end(header), expected.begin());
  std::fill(expected.begin() + 16, expected.begin() + 80, 0x88);
  expected[16] = 0x8F;
  expected[17] = 0xB6;
  expected[80] = 0x80;  // bfloat16 1.0; the second block is all zeros, and so is its scale
  expected[81] = 0x3F;
  CHECK(got.payload == expected, "byte " + std::to_string(FirstDifference(got.payload, expected)));
  Floats residual(65, 0.0f);
  residual[1] = -0.5f;
  CHECK(cases::SameBits(got.residual, residual), "residual");
  CHECK(got.norms == (std::vector<double>{49.0 + 6.25 + 9.0, 0.25, 0.0, 0.0}), "norms");
}
