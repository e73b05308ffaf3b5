// The code around the codecs: vectors of many parts, shards, ranges of blocks, lengths beyond 2^31, the caller's
// floating-point mode.
#include <sys/mman.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <string>

#include "cases.h"
#include "check.h"

namespace {

using cases::Bytes;
using cases::Floats;

std::vector<int64_t> RandomCuts(cases::Random* random, int64_t size, int count) {
  std::vector<int64_t> cuts;
  for (int i = 0; i < count; ++i) cuts.push_back(random->Below(size + 1));
  if (count > 3) cuts[1] = cuts[0];  // an empty part
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

Floats Slice(const Floats& values, int64_t from, int64_t to) {
  const auto size = static_cast<int64_t>(values.size());
  return Floats(values.begin() + std::min(from, size), values.begin() + std::min(std::max(from, to), size));
}

// Memory in which only touched pages exist; it is zero at first.
class SparseMemory {
 public:
  explicit SparseMemory(size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~SparseMemory() {
    if (ok()) munmap(data_, bytes_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  bool ok() const { return data_ != MAP_FAILED; }
  template <class T>
  T* As() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_;
  size_t bytes_;
};

}  // namespace

TEST(PartsMakeNoDifference) {
  cases::Random random(11);
  for (const tfpar_codec& codec : cases::Defaults()) {
    for (int round = 0; round < 12; ++round) {
      const int64_t size = 1 + random.Below(30000);
      const Floats x = cases::Values(&random, size, true), residual = cases::Values(&random, size, false);
      const auto whole = cases::Encode(codec, x, {}, 0, size, residual);
      const auto cut = cases::Encode(codec, x, RandomCuts(&random, size, round), 0, size, residual);
      CHECK(cut.payload == whole.payload, cases::Name(codec));
      CHECK(cases::SameBits(cut.residual, whole.residual), cases::Name(codec));
      CHECK(std::memcmp(cut.norms.data(), whole.norms.data(), whole.norms.size() * sizeof(double)) == 0, cases::Name(codec));
      int status = 0;
      const Floats sum = cases::DecodeSum(codec, size, {whole.payload, whole.payload}, 0.5f, {}, &status);
      const Floats cut_sum = cases::DecodeSum(codec, size, {whole.payload, whole.payload}, 0.5f,
                                              RandomCuts(&random, size, round), &status);
      CHECK(cases::SameBits(sum, cut_sum), cases::Name(codec));
    }
  }
}

// A block that begins in one part and ends in the next, in which the rest of the block lies in one piece.
TEST(BlocksAcrossParts) {
  cases::Random random(17);
  const std::vector<int64_t> cuts = {1961, 1961 + 8385};
  const int64_t size = 1961 + 8385 + 5760;
  const Floats x = cases::Values(&random, size, false), residual = cases::Values(&random, size, false);
  for (const tfpar_codec& codec : cases::All()) {
    const auto cut = cases::Encode(codec, x, cuts, 0, size, residual), whole = cases::Encode(codec, x, {}, 0, size, residual);
    CHECK(cut.payload == whole.payload, cases::Name(codec));
    CHECK(cases::SameBits(cut.residual, whole.residual), cases::Name(codec));
  }
}

// Shards of a vector; the last ones reach past its end or lie entirely past it.
TEST(ShardsReachBeyondTheEnd) {
  cases::Random random(12);
  for (const tfpar_codec& codec : cases::Defaults()) {
    const int64_t size = 5 * codec.block + random.Below(codec.block), shard = 2 * codec.block;
    const Floats x = cases::Values(&random, size, false), residual = cases::Values(&random, size, false);
    const auto cuts = RandomCuts(&random, size, 5);
    for (int64_t begin = 0; begin < 5 * shard; begin += shard) {
      const Floats own = Slice(residual, begin, begin + shard);
      const auto got = cases::Encode(codec, x, cuts, begin, shard, own);
      const auto expected = oracle::Encode(codec, Slice(x, begin, begin + shard), own, begin, shard);
      CHECK(got.payload == expected.payload, cases::Name(codec) + " shard at " + std::to_string(begin));
      CHECK(cases::SameBits(got.residual, expected.residual), cases::Name(codec));
      // Decoding drops elements past the end, and writes no other memory.
      cases::Pieces pieces(Floats(static_cast<size_t>(size), 9.0f), cuts);
      const tfpar_mutable_vector out = pieces.MutableView();
      const void* payload = got.payload.data();
      tfpar_decode_sum(&codec, shard, &payload, 1, 1.0f, &out, begin, 0, tfpar_num_blocks(&codec, shard));
      bool invalid = false;
      Floats written(static_cast<size_t>(size), 9.0f);
      const Floats d = oracle::DecodeSum(codec, shard, {got.payload}, 1.0f, &invalid);
      for (int64_t i = begin; i < std::min(begin + shard, size); ++i) written[i] = d[i - begin];
      CHECK(cases::SameBits(pieces.Joined(), written), cases::Name(codec) + " out at " + std::to_string(begin));
    }
  }
}

// Encoding blocks one by one, from the last to the first, gives the result of one call; a call does not touch other
// blocks.
TEST(RangesOfBlocks) {
  cases::Random random(13);
  for (const tfpar_codec& codec : cases::Defaults()) {
    const int64_t n = 6 * codec.block + 1 + random.Below(codec.block - 1), blocks = tfpar_num_blocks(&codec, n);
    const Floats x = cases::Values(&random, n, true), residual = cases::Values(&random, n, false);
    const auto whole = cases::Encode(codec, x, {}, 0, n, residual);
    const cases::Pieces pieces(x, RandomCuts(&random, n, 4));
    const tfpar_vector view = pieces.View();
    Bytes payload(whole.payload.size(), 0xEE), recoded = payload;
    Floats rest = residual, rest_recoded = residual, sum(static_cast<size_t>(n));
    std::vector<double> norms(whole.norms.size());
    tfpar_write_frame(&codec, n, payload.data());
    tfpar_write_frame(&codec, n, recoded.data());
    const void* const peers[] = {whole.payload.data(), whole.payload.data(), whole.payload.data()};
    float* const out[] = {sum.data()};
    const int64_t offset[] = {0, n};
    const tfpar_mutable_vector to = {out, offset, 1};
    for (int64_t block = blocks - 1; block >= 0; --block) {
      tfpar_encode(&codec, &view, 0, n, rest.data(), rest.data(), payload.data(), block, block + 1, &norms[2 * block]);
      tfpar_decode_sum(&codec, n, peers, 3, 1.0f, &to, 0, block, block + 1);
      tfpar_recode(&codec, n, peers, 3, 1.0f, n, 0, rest_recoded.data(), rest_recoded.data(), recoded.data(), block,
                   block + 1, nullptr);
    }
    int status = 0;
    const std::vector<Bytes> payloads(3, whole.payload);
    const auto all = cases::Recode(codec, n, payloads, 1.0f, n, 0, residual);
    CHECK(payload == whole.payload && cases::SameBits(rest, whole.residual), cases::Name(codec));
    CHECK(std::memcmp(norms.data(), whole.norms.data(), norms.size() * sizeof(double)) == 0, cases::Name(codec));
    CHECK(cases::SameBits(sum, cases::DecodeSum(codec, n, payloads, 1.0f, {}, &status)), cases::Name(codec));
    CHECK(recoded == all.payload && cases::SameBits(rest_recoded, all.residual), cases::Name(codec));
  }
}

// The last blocks of vectors so long that 32-bit indices of elements, bytes and codes would overflow.
TEST(LengthsBeyond32Bits) {
  const int64_t n = (int64_t{1} << 33) + 1000003;
  const SparseMemory x(static_cast<size_t>(n) * 4), residual(static_cast<size_t>(n) * 4), payload(static_cast<size_t>(n) * 2 + 4096);
  CHECK(x.ok() && residual.ok() && payload.ok(), "no address space");
  if (!x.ok() || !residual.ok() || !payload.ok()) return;
  cases::Random random(14);
  for (const tfpar_codec& codec : cases::Defaults()) {
    const int64_t blocks = tfpar_num_blocks(&codec, n), first = blocks - 4, at = first * codec.block;
    const Floats values = cases::Values(&random, n - at, false);
    std::copy(values.begin(), values.end(), x.As<float>() + at);
    std::fill(residual.As<float>() + at, residual.As<float>() + n, 0.0f);
    const float* const data[] = {x.As<float>(), x.As<float>() + n - 700};
    const int64_t offset[] = {0, n - 700, n};
    const tfpar_vector view = {data, offset, 2};
    tfpar_encode(&codec, &view, 0, n, residual.As<float>(), residual.As<float>(), payload.As<void>(), first, blocks, nullptr);
    const auto expected = oracle::Encode(codec, values, {}, at, n - at);
    const Floats rest(residual.As<float>() + at, residual.As<float>() + n);
    CHECK(cases::SameBits(rest, expected.residual), cases::Name(codec));
    std::fill(x.As<float>() + at, x.As<float>() + n, -3.0f);
    float* const out[] = {x.As<float>()};
    const int64_t out_offset[] = {0, n};
    const tfpar_mutable_vector to = {out, out_offset, 1};
    const void* const peers[] = {payload.As<void>()};
    tfpar_decode_sum(&codec, n, peers, 1, 1.0f, &to, 0, first, blocks);
    bool invalid = false;
    const Floats decoded(x.As<float>() + at, x.As<float>() + n);
    const Floats d = oracle::DecodeSum(codec, n - at, {expected.payload}, 1.0f, &invalid);
    CHECK(cases::FirstDifference(decoded, d) == -1, cases::Name(codec));
    CHECK(tfpar_payload_bytes(&codec, n) > n / 64, cases::Name(codec));
  }
}

// Payloads and outputs so large that the kernels bypass the caches have the same bytes, at any address.
TEST(LargeVectorsAtAnyAddress) {
  cases::Random random(15);
  const int64_t n = (5 << 20) + 77;
  const Floats x = cases::Values(&random, n, true);
  for (const tfpar_codec& codec : cases::Defaults()) {
    const auto expected = cases::Encode(codec, x, {}, 0, n, {});
    for (int shift : {0, 4, 16}) {
      Bytes buffer(expected.payload.size() + 64);
      uint8_t* start = buffer.data() + (64 - reinterpret_cast<uintptr_t>(buffer.data()) % 64) % 64;
      if (shift > static_cast<int>(buffer.data() + 64 - start)) shift = 0;
      Bytes shifted(expected.payload.size() + 128);
      uint8_t* payload = shifted.data() + (128 - reinterpret_cast<uintptr_t>(shifted.data()) % 64) % 64 + shift;
      const float* const data[] = {x.data()};
      const int64_t offset[] = {0, n};
      const tfpar_vector view = {data, offset, 1};
      Floats rest(static_cast<size_t>(n));
      tfpar_write_frame(&codec, n, payload);
      tfpar_encode(&codec, &view, 0, n, nullptr, rest.data(), payload, 0, tfpar_num_blocks(&codec, n), nullptr);
      CHECK(std::memcmp(payload, expected.payload.data(), expected.payload.size()) == 0, cases::Name(codec));
      CHECK(cases::SameBits(rest, expected.residual), cases::Name(codec));
    }
    int status = 0;
    const Floats once = cases::DecodeSum(codec, n, {expected.payload}, 0.5f, {}, &status);
    const Floats cut = cases::DecodeSum(codec, n, {expected.payload}, 0.5f, {1, 1000001, 2000003}, &status);
    bool invalid = false;
    CHECK(cases::SameBits(once, cut), cases::Name(codec));
    CHECK(cases::FirstDifference(once, oracle::DecodeSum(codec, n, {expected.payload}, 0.5f, &invalid)) == -1,
          cases::Name(codec));
  }
}

// Payloads need no alignment.
TEST(PayloadsAtOddAddresses) {
  cases::Random random(16);
  for (const tfpar_codec& codec : cases::Defaults()) {
    const int64_t n = 3 * codec.block + 5;
    const Floats x = cases::Values(&random, n, true);
    const auto expected = cases::Encode(codec, x, {}, 0, n, x);
    Bytes shifted(expected.payload.size() + 1);
    std::copy(expected.payload.begin(), expected.payload.end(), shifted.begin() + 1);
    const void* const peers[] = {shifted.data() + 1};
    Floats out(static_cast<size_t>(n));
    float* const data[] = {out.data()};
    const int64_t offset[] = {0, n};
    const tfpar_mutable_vector to = {data, offset, 1};
    tfpar_decode_sum(&codec, n, peers, 1, 1.0f, &to, 0, 0, tfpar_num_blocks(&codec, n));
    int status = 0;
    CHECK(cases::SameBits(out, cases::DecodeSum(codec, n, {expected.payload}, 1.0f, {}, &status)), cases::Name(codec));
  }
}

TEST(RoundingModeOfTheCallerIsNeitherUsedNorChanged) {
  cases::Random random(17);
  const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
  for (const tfpar_codec& codec : cases::Defaults()) {
    const Floats x = cases::Values(&random, 9000, false);
    const auto expected = cases::Encode(codec, x, {}, 0, 9000, x);
    for (int mode : modes) {
      std::fesetround(mode);
      const auto got = cases::Encode(codec, x, {}, 0, 9000, x);
      const int after = std::fegetround();
      std::fesetround(FE_TONEAREST);
      CHECK(after == mode, "mode " + std::to_string(after));
      CHECK(got.payload == expected.payload && cases::SameBits(got.residual, expected.residual), cases::Name(codec));
    }
    volatile float smallest = 1.17549435e-38f;
    CHECK(smallest / 2 > 0, "denormals of the caller are gone");
  }
}

TEST(ResidualMayBeAnotherArrayOrNone) {
  cases::Random random(18);
  for (const tfpar_codec& codec : cases::Defaults()) {
    const int64_t n = 2 * codec.block + 7;
    const Floats x = cases::Values(&random, n, true), residual = cases::Values(&random, n, true);
    const auto in_place = cases::Encode(codec, x, {}, 0, n, residual);
    const float* const data[] = {x.data()};
    const int64_t offset[] = {0, n};
    const tfpar_vector view = {data, offset, 1};
    Bytes payload(in_place.payload.size());
    Floats other(static_cast<size_t>(n), 1.0f);
    std::vector<double> norms(in_place.norms.size());
    tfpar_write_frame(&codec, n, payload.data());
    const int64_t blocks = tfpar_num_blocks(&codec, n);
    tfpar_encode(&codec, &view, 0, n, residual.data(), other.data(), payload.data(), 0, blocks, nullptr);
    CHECK(payload == in_place.payload && cases::SameBits(other, in_place.residual), cases::Name(codec));
    tfpar_encode(&codec, &view, 0, n, residual.data(), nullptr, payload.data(), 0, blocks, norms.data());
    CHECK(payload == in_place.payload, cases::Name(codec));
    CHECK(std::memcmp(norms.data(), in_place.norms.data(), norms.size() * sizeof(double)) == 0, cases::Name(codec));
  }
}

TEST(SumOfSquares) {
  cases::Random random(19);
  for (int round = 0; round < 200; ++round) {
    const int64_t size = 1 + random.Below(20000), begin = random.Below(size), end = begin + random.Below(size - begin + 1);
    const Floats x = cases::Values(&random, size, round % 4 == 0);
    const auto sum = [&](const std::vector<int64_t>& cuts) {
      const cases::Pieces pieces(x, cuts);
      const tfpar_vector view = pieces.View();
      return tfpar_sum_squares(&view, begin, end);
    };
    double expected = 0;
    bool finite = true;
    for (int64_t i = begin; i < end; ++i) {
      expected += static_cast<double>(x[i]) * x[i];
      finite = finite && std::isfinite(x[i]);
    }
    const double got = sum({}), cut = sum(RandomCuts(&random, size, 6));
    CHECK(std::isfinite(got) == finite, std::to_string(got));
    CHECK(!finite || std::fabs(got - expected) <= 1e-12 * expected + 1e-70, std::to_string(got));
    CHECK(std::memcmp(&got, &cut, sizeof got) == 0 || !finite, std::to_string(cut));
  }
}
