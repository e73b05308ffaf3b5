// The kernels against the processor's codecs, bit for bit.
#include <algorithm>
#include <cmath>
#include <string>

#include "../../../tfpar_ops/core/layout.h"
#include "device.h"

namespace {

using cases::Bytes;
using cases::Floats;

std::string At(const tfpar_codec& codec, int64_t n, int64_t index) {
  return cases::Name(codec) + ", n " + std::to_string(n) + ", at " + std::to_string(index);
}

std::vector<int64_t> Cuts(cases::Random* random, int64_t size, int64_t count) {
  std::vector<int64_t> cuts;
  for (int64_t i = 0; i < count; ++i) cuts.push_back(random->Below(size + 1));
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

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

// The sums over all blocks of the first and of the second norm.
std::vector<double> Totals(const std::vector<double>& norms) {
  std::vector<double> totals(2, 0.0);
  for (size_t i = 0; i < norms.size(); ++i) totals[i % 2] += norms[i];
  return totals;
}

void CheckEncoded(const tfpar_codec& codec, int64_t n, const cases::Encoded& got, const cases::Encoded& expected) {
  const auto byte = std::mismatch(got.payload.begin(), got.payload.end(), expected.payload.begin()).first;
  CHECK(byte == got.payload.end(), "payload byte, " + At(codec, n, byte - got.payload.begin()));
  CHECK(cases::SameBits(got.residual, expected.residual),
        "residual, " + At(codec, n, cases::FirstDifference(got.residual, expected.residual)));
  CHECK(cases::Close(got.norms, Totals(expected.norms)), "norms, " + At(codec, n, -1));
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

// More parts than one launch has room for; and too many parts in one place, which is an error.
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

TEST(TooManyPartsInOnePlace) {
  const tfpar_codec codec = cases::Defaults()[0];
  const float element = 1.0f;
  for (int64_t parts : {TFPAR_CUDA_MAX_PARTS, TFPAR_CUDA_MAX_PARTS + 1}) {
    const device::Array<float> x(static_cast<size_t>(parts), element);
    std::vector<const float*> data;
    std::vector<int64_t> offset = {0};
    for (int64_t i = 0; i < parts; ++i) {
      data.push_back(x.data() + i);
      offset.push_back(i + 1);
    }
    const tfpar_vector view = {data.data(), offset.data(), parts};
    const device::Array<uint8_t> payload(static_cast<size_t>(tfpar_payload_bytes(&codec, parts)), 0);
    const int error =
        tfpar_cuda_encode(&codec, &view, 0, parts, nullptr, nullptr, payload.data(), nullptr, nullptr, nullptr);
    CHECK(error == (parts > TFPAR_CUDA_MAX_PARTS ? cudaErrorNotSupported : cudaSuccess), std::to_string(error));
    device::Must(cudaDeviceSynchronize(), "tfpar_cuda_encode");
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

TEST(Arguments) {
  tfpar_codec codec = cases::Defaults()[2];
  const device::Array<uint8_t> memory(4096, 0);
  void* payload = memory.data();
  const int64_t offset[] = {0};
  const tfpar_vector x = {nullptr, offset, 0};
  const auto encode = [&](int64_t begin, int64_t n, void* to, double* norms) {
    return tfpar_cuda_encode(&codec, &x, begin, n, nullptr, nullptr, to, norms, nullptr, nullptr);
  };
  CHECK(encode(0, -1, payload, nullptr) == cudaErrorInvalidValue, "length");
  CHECK(encode(1, 10, payload, nullptr) == cudaErrorInvalidValue, "not at a block");
  CHECK(encode(0, 10, nullptr, nullptr) == cudaErrorInvalidValue, "no payload");
  CHECK(encode(0, 10, memory.data() + 2, nullptr) == cudaErrorMisalignedAddress, "address");
  CHECK(encode(0, 10, payload, reinterpret_cast<double*>(payload)) == cudaErrorInvalidValue, "no scratch");
  codec.block = 100;
  CHECK(encode(0, 10, payload, nullptr) == cudaErrorInvalidValue, "block");
  CHECK(tfpar_cuda_scratch_bytes(nullptr, -1) == -1, "length");
  codec.block = 512;
  const std::vector<const void*> payloads(TFPAR_CUDA_MAX_PEERS + 1, payload);
  CHECK(tfpar_cuda_recode(&codec, 10, payloads.data(), TFPAR_CUDA_MAX_PEERS + 1, 1.0f, nullptr, 10, 0, nullptr, nullptr,
                          payload, nullptr, nullptr, nullptr, nullptr) == cudaErrorInvalidValue,
        "peers");
  CHECK(tfpar_cuda_recode(&codec, 10, payloads.data(), 1, 1.0f, nullptr, 11, 0, nullptr, nullptr, payload, nullptr,
                          nullptr, nullptr, nullptr) == cudaErrorInvalidValue,
        "valid");
}
