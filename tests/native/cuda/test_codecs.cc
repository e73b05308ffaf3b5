// The kernels against the processor's codecs, bit for bit: any length, number of peers and parts, position and scale.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "../../../tfpar_ops/core/layout.h"
#include "../oracle_numbers.h"
#include "support.h"

namespace {

using cases::Bytes;
using cases::Floats;
using support::At;
using support::CheckEncoded;
using support::Cuts;

// Half of the time the values of cases.h, whose extremes make most large blocks infinite; else moderate values: a wide
// range of normal numbers, with runs of zeros and of equal numbers.
Floats AnyValues(cases::Random* random, int64_t n, bool non_finite) {
  if (random->Below(2) == 0) return cases::Values(random, n, non_finite);
  Floats values(static_cast<size_t>(n));
  int64_t pattern = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (random->Below(500) == 0) pattern = random->Below(4);
    float& value = values[static_cast<size_t>(i)];
    if (pattern < 2) value = std::ldexp(random->Normal(), static_cast<int>(random->Below(20)) - 10);
    if (pattern == 2) value = random->Below(2) ? 0.5f : -0.5f;
  }
  if (non_finite && n > 0) values[static_cast<size_t>(random->Below(n))] = NAN;
  return values;
}

int64_t Log2(int64_t power) { return power == 1 ? 0 : 1 + Log2(power / 2); }

device::Manner AnyManner(cases::Random* random) {
  return {random->Below(2) != 0, random->Below(2) != 0, static_cast<size_t>(random->Below(4))};
}

// For each peer, encodes a range of a vector that consists of parts; then decodes the sum into a vector with other
// parts, and encodes the sum again.
void CheckLength(const tfpar_codec& codec, int64_t n, int peers, cases::Random* random) {
  const int64_t begin = codec.block * random->Below(4);
  const int64_t valid = random->Below(3) == 0 ? random->Below(n + 1) : n;
  const bool with_residual = random->Below(4) != 0 && valid > 0;
  std::vector<Bytes> payloads;
  for (int peer = 0; peer < peers; ++peer) {
    const Floats x = AnyValues(random, begin + valid, random->Below(4) == 0);
    const Floats residual = with_residual ? AnyValues(random, valid, random->Below(6) == 0) : Floats();
    const std::vector<int64_t> cuts = Cuts(random, begin + valid, random->Below(2) * random->Below(6));
    const cases::Encoded expected = cases::Encode(codec, x, cuts, begin, n, residual);
    CheckEncoded(codec, n, device::Encode(codec, x, cuts, begin, n, residual, AnyManner(random)), expected);
    payloads.push_back(expected.payload);
  }

  const float factor = random->Below(2) ? 1.0f : 1.0f / static_cast<float>(peers + 1);
  int status = 0, device_status = 0;
  const Floats sum = cases::DecodeSum(codec, n, payloads, factor, {}, &status);
  const int64_t size = begin + valid + (valid == n ? random->Below(5) : 0);
  Floats expected(static_cast<size_t>(size), -5.0f);
  std::copy(sum.begin(), sum.begin() + valid, expected.begin() + begin);
  const std::vector<int64_t> cuts = Cuts(random, size, random->Below(2) * random->Below(6));
  const Floats got =
      device::DecodeSum(codec, n, payloads, factor, size, cuts, begin, AnyManner(random), &device_status);
  const int64_t element = cases::FirstDifference(got, expected);
  CHECK(element == -1, "sum, " + At(codec, n, element));
  CHECK(status == 0 && device_status == 0, "status, " + At(codec, n, -1));

  const Floats residual = with_residual ? AnyValues(random, valid, false) : Floats();
  CheckEncoded(codec, n,
               device::Recode(codec, n, payloads, factor, valid, begin, residual, AnyManner(random), &device_status),
               cases::Recode(codec, n, payloads, factor, valid, begin, residual));
}

}  // namespace

TEST(EveryOption) {
  cases::Random random(1);
  for (const tfpar_codec& codec : cases::All()) {
    const int rounds = kEmulated ? 1 : 20;
    for (int round = 0; round < rounds; ++round) {
      CheckLength(codec, random.Below(3) ? 4096 + random.Below(9000) : random.Below(300), 1 + round % 3, &random);
      CheckLength(codec, 4 * random.Below(3000), 2, &random);
    }
  }
}

TEST(LengthsAroundBlocks) {
  cases::Random random(2);
  for (const tfpar_codec& codec : cases::Defaults()) {
    const int64_t block = codec.block;
    for (int64_t n : {int64_t{0}, int64_t{1}, int64_t{2}, block - 1, block, block + 1, 2 * block, int64_t{4095},
                      int64_t{4096}, int64_t{4097}, int64_t{8192}}) {
      CheckLength(codec, n, 1, &random);
    }
    if (!kEmulated) CheckLength(codec, 3000001, 4, &random);
  }
}

TEST(ManyPeers) {
  cases::Random random(3);
  for (const tfpar_codec& codec : cases::Defaults()) {
    for (int peers : {3, 4, 5, 7, TFPAR_CUDA_MAX_PEERS}) CheckLength(codec, 1 + random.Below(600), peers, &random);
  }
}

TEST(NoPeers) {
  for (const tfpar_codec& codec : cases::Defaults()) {
    int status = 0;
    const Floats sum = device::DecodeSum(codec, 5000, {}, 0.5f, 5000, {}, 0, {false, false, 0}, &status);
    CHECK(cases::SameBits(sum, Floats(5000, 0.0f)), cases::Name(codec));
  }
}

// More parts than one launch has room for.
TEST(ManyParts) {
  cases::Random random(4);
  for (const tfpar_codec& codec : cases::Defaults()) {
    const int64_t n = 30011;
    const Floats x = cases::Values(&random, n, false), residual = cases::Values(&random, n, false);
    std::vector<int64_t> cuts = Cuts(&random, n, 3);
    for (int64_t cut = 40; cut < n; cut += 40 + random.Below(40)) cuts.push_back(cut);
    std::sort(cuts.begin(), cuts.end());
    const cases::Encoded expected = cases::Encode(codec, x, cuts, 0, n, residual);
    CheckEncoded(codec, n, device::Encode(codec, x, cuts, 0, n, residual, {true, false, 0}), expected);
    int status = 0;
    const Floats sum = cases::DecodeSum(codec, n, {expected.payload}, 1.0f, {}, &status);
    const Floats got = device::DecodeSum(codec, n, {expected.payload}, 1.0f, n, cuts, 0, {}, &status);
    const int64_t element = cases::FirstDifference(got, sum);
    CHECK(element == -1, "sum, " + At(codec, n, element));
  }
}

// A range far into a vector, of which only the last part has memory.
TEST(PositionsBeyond2To31) {
  cases::Random random(5);
  for (tfpar_codec codec : cases::Defaults()) {
    const int64_t begin = (int64_t{1} << 40) + 3 * codec.block, n = 9000;
    const Floats x = cases::Values(&random, n, false);
    const std::vector<int64_t> offset = {0, begin, begin + n};
    const std::vector<const float*> host = {nullptr, x.data()};
    const tfpar_vector view = {host.data(), offset.data(), 2};
    Bytes expected(static_cast<size_t>(tfpar_payload_bytes(&codec, n)));
    Floats residual(static_cast<size_t>(n));
    tfpar_write_frame(&codec, n, expected.data());
    tfpar_encode(&codec, &view, begin, n, nullptr, residual.data(), expected.data(), 0, tfpar_num_blocks(&codec, n),
                 nullptr);

    const device::Array<float> on_device(x);
    const std::vector<const float*> data = {nullptr, on_device.data()};
    const tfpar_vector device_view = {data.data(), offset.data(), 2};
    device::Array<uint8_t> payload(expected.size(), 0xEE);
    device::Must(
        tfpar_cuda_encode(&codec, &device_view, begin, n, nullptr, nullptr, payload.data(), nullptr, nullptr, nullptr),
        "tfpar_cuda_encode");
    CHECK(payload.Read() == expected, cases::Name(codec));
  }
}

#if !defined(TFPAR_EMULATION)
// One encoded range of more than 2^31 elements, in which all parts are the same array.
TEST(LengthBeyond2To31) {
  cases::Random random(12);
  const tfpar_codec codec = {TFPAR_SIGN, 4096, 0, 32, 0, 0, 0};
  const int64_t part = (int64_t{1} << 24) + 7, parts = 129, n = part * parts;
  const Floats x = AnyValues(&random, part, false);
  const device::Array<float> on_device(x);
  std::vector<int64_t> offset;
  for (int64_t i = 0; i <= parts; ++i) offset.push_back(i * part);
  const std::vector<const float*> host(static_cast<size_t>(parts), x.data());
  const std::vector<const float*> data(static_cast<size_t>(parts), on_device.data());
  const tfpar_vector view = {host.data(), offset.data(), parts}, device_view = {data.data(), offset.data(), parts};
  Bytes expected(static_cast<size_t>(tfpar_payload_bytes(&codec, n)));
  tfpar_write_frame(&codec, n, expected.data());
  tfpar_encode(&codec, &view, 0, n, nullptr, nullptr, expected.data(), 0, tfpar_num_blocks(&codec, n), nullptr);
  device::Array<uint8_t> payload(expected.size(), 0xEE);
  device::Must(
      tfpar_cuda_encode(&codec, &device_view, 0, n, nullptr, nullptr, payload.data(), nullptr, nullptr, nullptr),
      "tfpar_cuda_encode");
  CHECK(payload.Read() == expected, cases::Name(codec));
}
#endif

// The limits of scales: up to 2^-126 they become 0, and above 2^126 they are capped.
TEST(SmallestAndLargestScales) {
  cases::Random random(10);
  for (const tfpar_codec& codec : cases::All()) {
    if (tfpar::FindFormat(codec.kind)->scale == tfpar::ScaleType::NONE || codec.block > 512) continue;
    for (float unit : {oracle::FromBits(0x00800000), oracle::FromBits(0x00800001), oracle::FromBits(0x00807FFF),
                       oracle::FromBits(0x00808001), oracle::FromBits(0x7E7FFFFF), oracle::FromBits(0x7E800000),
                       oracle::FromBits(0x7F600000), oracle::FromBits(0x7F600001), oracle::FromBits(0x7F7FFFFF)}) {
      const int64_t n = codec.block;
      for (float factor : {1.0f, 7.0f, 127.0f, 1.99999988f, static_cast<float>(n)}) {
        if (unit > 1.0f && factor != 1.0f) continue;
        const float value = unit * factor;
        Floats x(static_cast<size_t>(n), 0.0f);
        x[0] = value;  // the only non-zero element in a block of sign: the mean is value / n
        for (int64_t i = 1; i < n && codec.kind != TFPAR_SIGN; ++i) {
          x[static_cast<size_t>(i)] = random.Below(2) ? value : -value;
        }
        CheckEncoded(codec, n, device::Encode(codec, x, {}, 0, n, {}, {}), cases::Encode(codec, x, {}, 0, n, {}));
      }
    }
  }
}

// Makes the order of sign's sum visible: adds a large number just at a tie of the scale's rounding and two small ones,
// which are lost unless they are added to each other before either is added to the large one.
TEST(SignAddsByHalves) {
  cases::Random random(11);
  for (int block = 64; block <= 4096; block *= 2) {
    const tfpar_codec codec = {TFPAR_SIGN, block, 0, 32, 0, 0, 0};
    const int64_t n = 64 * block;
    Floats x(static_cast<size_t>(n), 0.0f);
    for (int64_t first = 0; first < n; first += block) {
      const int64_t stride = int64_t{1} << random.Below(Log2(block));
      const int64_t small = random.Below(block);
      x[static_cast<size_t>(first + small)] = 0x1p-24f;
      x[static_cast<size_t>(first + (small ^ stride))] = 0x1p-24f;
      x[static_cast<size_t>(first + random.Below(block))] = 1.0f + 0x1p-17f;
    }
    CheckEncoded(codec, n, device::Encode(codec, x, {}, 0, n, {}, {}), cases::Encode(codec, x, {}, 0, n, {}));
  }
}
