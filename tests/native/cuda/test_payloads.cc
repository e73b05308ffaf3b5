// Payloads that no encoder writes: the kernels decode them as the processor does, and report errors.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "../../../tfpar_ops/core/layout.h"
#include "../oracle_numbers.h"
#include "support.h"

using cases::Bytes;
using cases::Floats;
using support::At;
using support::CheckEncoded;

// Payloads that no encoder writes: random bytes after a valid header. The unscaled sum of one payload is the decoded
// payload, signs of zeros and denormals included.
TEST(HostilePayloads) {
  cases::Random random(6);
  for (const tfpar_codec& codec : cases::All()) {
    const int64_t n = 1 + random.Below(5000);
    std::vector<Bytes> payloads;
    for (int peer = 0; peer < 3; ++peer) {
      Bytes payload(static_cast<size_t>(tfpar_payload_bytes(&codec, n)));
      for (uint8_t& byte : payload) byte = static_cast<uint8_t>(random.Next());
      for (size_t i = 16; codec.kind == TFPAR_TOPK && i + 1 < payload.size();
           i += 2) {  // positions all within the block
        payload[i] &= static_cast<uint8_t>(codec.block - 1);
        payload[i + 1] &= static_cast<uint8_t>((codec.block - 1) >> 8);
      }
      // Scales at the edges: zeros, denormals, the smallest normal numbers, the largest, infinity and NaN, of both
      // signs.
      static constexpr uint32_t kScales[] = {0x00000000, 0x00400000, 0x007F0000, 0x007FFF80, 0x00800000,
                                             0x7E800000, 0x7F7F0000, 0x7F800000, 0x7FC00000};
      for (int64_t block = 0; codec.scale_bits != 0 && block < tfpar_num_blocks(&codec, n); ++block) {
        if (random.Below(4) == 0) continue;
        const uint32_t scale = kScales[random.Below(9)] | (random.Below(2) ? 0x80000000u : 0u);
        const int64_t at = tfpar::ScalesAt(codec, n) + block * tfpar::ScaleBytes(codec);
        for (int byte = 0; byte < codec.scale_bits / 8; ++byte) {
          payload[static_cast<size_t>(at + byte)] = static_cast<uint8_t>(scale >> (32 - codec.scale_bits + 8 * byte));
        }
      }
      tfpar_write_frame(&codec, n, payload.data());
      payloads.push_back(payload);
      if (peer == 1) continue;  // one payload, then three
      const float factor = peer == 0 ? 1.0f : 0.5f;
      int status = 0, device_status = 0;
      const Floats expected = cases::DecodeSum(codec, n, payloads, factor, {}, &status);
      const Floats got = device::DecodeSum(codec, n, payloads, factor, n, {}, 0, {}, &device_status);
      const int64_t element = cases::FirstDifference(got, expected);
      CHECK(element == -1, "sum, " + At(codec, n, element));
      CHECK(status == 0 && device_status == 0, "status, " + At(codec, n, -1));
      CheckEncoded(codec, n, device::Recode(codec, n, payloads, factor, n, 0, {}, {}, &device_status),
                   cases::Recode(codec, n, payloads, factor, n, 0, {}));
    }
  }
}

// With any bit of a header flipped, the whole result is NaN and the residual is unchanged.
TEST(ForeignHeaders) {
  cases::Random random(7);
  for (const tfpar_codec& codec : cases::Defaults()) {
    const int64_t n = 5000;
    const Floats x = cases::Values(&random, n, false);
    std::vector<Bytes> payloads(3, cases::Encode(codec, x, {}, 0, n, {}).payload);
    payloads[static_cast<size_t>(random.Below(3))][static_cast<size_t>(random.Below(16))] ^= 1 << random.Below(8);
    int status = 0;
    for (float value : device::DecodeSum(codec, n, payloads, 1.0f, n, {}, 0, {}, &status)) {
      CHECK(std::isnan(value), cases::Name(codec));
    }
    CHECK(status == 1, cases::Name(codec));
    const cases::Encoded again = device::Recode(codec, n, payloads, 1.0f, n, 0, x, {}, &status);
    CHECK(status == 1 && cases::SameBits(again.residual, x), cases::Name(codec));
    for (float value : cases::DecodeSum(codec, n, {again.payload}, 1.0f, {}, &status)) {
      CHECK(std::isnan(value), cases::Name(codec));
    }
  }
}

// A payload without elements cannot decode to NaN; the status still reports its wrong header.
TEST(ForeignHeadersOfNothing) {
  for (const tfpar_codec& codec : cases::Defaults()) {
    std::vector<Bytes> payloads(2, cases::Encode(codec, {}, {}, 0, 0, {}).payload);
    for (int wrong = 0; wrong < 2; ++wrong) {
      int decoding = 0, recoding = 0;
      device::DecodeSum(codec, 0, payloads, 1.0f, 0, {}, 0, {}, &decoding);
      device::Recode(codec, 0, payloads, 1.0f, 0, 0, {}, {}, &recoding);
      CHECK(decoding == wrong && recoding == wrong, cases::Name(codec));
      payloads[1][15] ^= 1;
    }
  }
}

TEST(PositionOutsideItsBlock) {
  const tfpar_codec codec = {TFPAR_TOPK, 256, 3, 0, 0, 0, 0};
  const int64_t n = 1000;
  cases::Random random(8);
  const Floats x = cases::Values(&random, n, false);
  Bytes payload = cases::Encode(codec, x, {}, 0, n, {}).payload;
  int status = 0;
  const Floats expected = cases::DecodeSum(codec, n, {payload}, 1.0f, {}, &status);
  payload[16 + 12 + 3] = 1;  // the second position of block 1 becomes 256 or more
  const Floats got = device::DecodeSum(codec, n, {payload}, 1.0f, n, {}, 0, {}, &status);
  CHECK(status == 1, "status");
  for (size_t i = 0; i < got.size(); ++i) {
    CHECK(i / 256 == 1 ? std::isnan(got[i]) : oracle::Bits(got[i]) == oracle::Bits(expected[i]), std::to_string(i));
  }
}
