#include "cases.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../../tfpar_ops/core/layout.h"
#include "oracle_numbers.h"

namespace cases {
namespace {

constexpr uint64_t kSeed = 0x0123456789ABCDEFu, kStep = 0xFFFFFFFF00000003u;

tfpar_codec Dense(int kind, int block, int scale_bits = 0, int stochastic = 0) {
  return {kind, block, 0, scale_bits, stochastic, stochastic ? kSeed : 0, stochastic ? kStep : 0};
}

tfpar_codec TopK(int block, int keep) { return {TFPAR_TOPK, block, keep, 0, 0, 0, 0}; }

// Computing a block's norms must write nothing else, hence the guard values around them.
std::vector<double> GuardedNorms(int64_t blocks) { return std::vector<double>(static_cast<size_t>(2 * blocks + 2), -7.0); }

std::vector<double> Unguarded(const std::vector<double>& norms) {
  return std::vector<double>(norms.begin() + 1, norms.end() - 1);
}

std::vector<const void*> Pointers(const std::vector<Bytes>& payloads) {
  std::vector<const void*> pointers;
  for (const Bytes& payload : payloads) pointers.push_back(payload.data());
  return pointers;
}

}  // namespace

std::vector<tfpar_codec> Defaults() {
  std::vector<tfpar_codec> defaults;
  for (const tfpar::Format& format : tfpar::kFormats) {
    const int block = std::max(format.smallest_block, std::min(512, format.largest_block));
    const int scale_bits = format.scale == tfpar::ScaleType::FLOAT ? 16 : 0;
    const bool keeps = format.codes == tfpar::Codes::KEPT;
    defaults.push_back(keeps ? TopK(4096, 41) : Dense(format.number, block, scale_bits));
  }
  defaults.push_back(Dense(TFPAR_INT4, 512, 16, 1));
  return defaults;
}

std::vector<tfpar_codec> All() {
  std::vector<tfpar_codec> all = Defaults();
  for (const tfpar::Format& format : tfpar::kFormats) {
    if (format.codes == tfpar::Codes::KEPT || format.smallest_block == format.largest_block) continue;
    const bool scaled = format.scale == tfpar::ScaleType::FLOAT;
    const bool stochastic = format.rounding == tfpar::Rounding::STOCHASTIC;
    for (int block = format.smallest_block; block <= format.largest_block; block *= 2) {
      const bool wide = block % 3 == 1 || !stochastic;
      all.push_back(Dense(format.number, block, scaled ? wide ? 32 : 16 : 0));
      if (stochastic) all.push_back(Dense(format.number, block, scaled ? wide ? 16 : 32 : 0, 1));
    }
  }
  for (int keep : {1, 2, 7, 15, 16, 17, 63, 64}) all.push_back(TopK(64, keep));
  for (int keep : {1, 5, 64, 255, 256, 257, 500, 1023, 1024}) all.push_back(TopK(1024, keep));
  for (int keep : {1, 160, 1638, 4096, 16384}) all.push_back(TopK(16384, keep));
  return all;
}

std::string Name(const tfpar_codec& codec) {
  char text[128];
  std::snprintf(text, sizeof text, "%s block %d keep %d scale %d stochastic %d", tfpar::FindFormat(codec.kind)->name,
                codec.block, codec.keep, codec.scale_bits, codec.stochastic);
  return text;
}

uint64_t Random::Next() {  // splitmix64
  uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

float Random::Normal() {
  double sum = -6.0;  // of twelve uniform numbers: near enough
  for (int i = 0; i < 12; ++i) sum += static_cast<double>(Next() >> 11) * 0x1p-53;
  return static_cast<float>(sum);
}

Floats Values(Random* random, int64_t count, bool non_finite) {
  Floats values;
  while (static_cast<int64_t>(values.size()) < count) {
    const int64_t stretch = 1 + random->Below(700);
    const int64_t pattern = random->Below(12);
    const int scale = static_cast<int>(random->Below(250)) - 125;
    for (int64_t i = 0; i < stretch; ++i) {
      float value = random->Normal();
      if (pattern == 0) value = std::ldexp(value, scale);
      if (pattern == 1) value = static_cast<float>(random->Below(7) - 3);                       // many equal ones
      if (pattern == 2) value = random->Below(2) ? 0.0f : -0.0f;
      if (pattern == 3) value = oracle::FromBits(static_cast<uint32_t>(random->Next()) & 0x80FFFFFFu);  // denormals, 2^-126
      if (pattern == 4) value = oracle::FromBits((static_cast<uint32_t>(random->Next()) & 0x81FFFFFFu) | 0x7E000000u);
      if (pattern == 5) value = random->Below(50) ? 0.0f : value;                               // sparse
      if (pattern == 6) value = static_cast<float>(random->Below(509) - 254) * 0.5f;            // halfway for scale 1
      if (pattern == 7) value = std::ldexp(value, static_cast<int>(random->Below(60)) - 40);    // wide range in a block
      if (pattern == 8) value = oracle::FromBits(static_cast<uint32_t>(random->Next()) & 0xFFFFF000u);
      if (pattern == 9) value = oracle::FromBits((static_cast<uint32_t>(random->Next()) & 0x83FFFFFFu) | 0x44000000u);
      if (!std::isfinite(value)) value = 3.0f;
      if (non_finite && random->Below(3000) == 0) {
        const uint32_t kinds[] = {0x7F800000u, 0xFF800000u, 0x7FC00000u, 0xFFC12345u, 0x7F7FFFFFu, 0xFF7FFFFFu};
        value = oracle::FromBits(kinds[random->Below(6)]);
      }
      values.push_back(value);
    }
  }
  values.resize(static_cast<size_t>(count));
  return values;
}

Pieces::Pieces(const Floats& values, const std::vector<int64_t>& cuts) {
  std::vector<int64_t> ends = cuts;
  ends.push_back(static_cast<int64_t>(values.size()));
  offset_.push_back(0);
  for (int64_t end : ends) {
    parts_.emplace_back(values.begin() + offset_.back(), values.begin() + end);
    offset_.push_back(end);
  }
  for (Floats& part : parts_) {
    read_.push_back(part.data());
    write_.push_back(part.data());
  }
}

Floats Pieces::Joined() const {
  Floats all;
  for (const Floats& part : parts_) all.insert(all.end(), part.begin(), part.end());
  return all;
}

Encoded Encode(const tfpar_codec& codec, const Floats& x, const std::vector<int64_t>& cuts, int64_t begin, int64_t n,
               const Floats& residual) {
  const Pieces pieces(x, cuts);
  const tfpar_vector view = pieces.View();
  const int64_t blocks = tfpar_num_blocks(&codec, n);
  const int64_t valid = std::max<int64_t>(0, std::min<int64_t>(n, static_cast<int64_t>(x.size()) - begin));
  Encoded result;
  result.payload.assign(static_cast<size_t>(tfpar_payload_bytes(&codec, n)), 0xEE);
  result.residual = residual.empty() ? Floats(static_cast<size_t>(valid), 7.0f) : residual;
  result.norms = GuardedNorms(blocks);
  tfpar_write_frame(&codec, n, result.payload.data());
  tfpar_encode(&codec, &view, begin, n, residual.empty() ? nullptr : result.residual.data(), result.residual.data(),
               result.payload.data(), 0, blocks, result.norms.data() + 1);
  result.norms = Unguarded(result.norms);
  return result;
}

Floats DecodeSum(const tfpar_codec& codec, int64_t n, const std::vector<Bytes>& payloads, float factor,
                 const std::vector<int64_t>& cuts, int* status) {
  Pieces pieces(Floats(static_cast<size_t>(n), -5.0f), cuts);
  const tfpar_mutable_vector view = pieces.MutableView();
  const auto pointers = Pointers(payloads);
  *status = tfpar_decode_sum(&codec, n, pointers.data(), static_cast<int64_t>(pointers.size()), factor, &view, 0, 0,
                             tfpar_num_blocks(&codec, n));
  return pieces.Joined();
}

Encoded Recode(const tfpar_codec& codec, int64_t n, const std::vector<Bytes>& payloads, float factor, int64_t valid,
               int64_t begin, const Floats& residual) {
  const auto pointers = Pointers(payloads);
  const int64_t blocks = tfpar_num_blocks(&codec, n);
  Encoded result;
  result.payload.assign(static_cast<size_t>(tfpar_payload_bytes(&codec, n)), 0xEE);
  result.residual = residual.empty() ? Floats(static_cast<size_t>(valid), 7.0f) : residual;
  result.norms = GuardedNorms(blocks);
  tfpar_write_frame(&codec, n, result.payload.data());
  tfpar_recode(&codec, n, pointers.data(), static_cast<int64_t>(pointers.size()), factor, valid, begin,
               residual.empty() ? nullptr : result.residual.data(), result.residual.data(), result.payload.data(), 0,
               blocks, result.norms.data() + 1);
  result.norms = Unguarded(result.norms);
  return result;
}

int64_t FirstDifference(const Floats& a, const Floats& b) {
  if (a.size() != b.size()) return static_cast<int64_t>(std::min(a.size(), b.size()));
  for (size_t i = 0; i < a.size(); ++i) {
    if (oracle::Bits(a[i]) != oracle::Bits(b[i]) && !(std::isnan(a[i]) && std::isnan(b[i]))) return static_cast<int64_t>(i);
  }
  return -1;
}

bool SameBits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

bool Close(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isfinite(a[i]) != std::isfinite(b[i])) return false;
    if (std::isfinite(a[i]) && std::fabs(a[i] - b[i]) > 1e-12 * (std::fabs(a[i]) + std::fabs(b[i]))) return false;
  }
  return true;
}

}  // namespace cases
