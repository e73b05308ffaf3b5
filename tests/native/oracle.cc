#include "oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "oracle_numbers.h"

namespace oracle {
namespace {

int64_t Blocks(const tfpar_codec& codec, int64_t n) { return (n + codec.block - 1) / codec.block; }

// The bits of a symmetric integer; 0 for the other formats.
int IntegerBits(const tfpar_codec& codec) {
  return codec.kind == TFPAR_INT8 ? 8 : codec.kind == TFPAR_INT4 ? 4 : codec.kind == TFPAR_INT2 ? 2 : 0;
}

// Whether the format has scales that are bf16 or float32.
bool HasScale(const tfpar_codec& codec) { return IntegerBits(codec) != 0 || codec.kind == TFPAR_SIGN; }

int64_t CodeBytes(const tfpar_codec& codec) {
  switch (codec.kind) {
    case TFPAR_BF16:
    case TFPAR_FP16:
      return 2 * codec.block;
    case TFPAR_FP8:
      return codec.block;
    case TFPAR_SIGN:
      return codec.block / 8;
    case TFPAR_TOPK:
      return 4 * codec.keep;
    default:
      return codec.block * IntegerBits(codec) / 8;
  }
}

int64_t ScaleBytes(const tfpar_codec& codec) { return codec.kind == TFPAR_FP8 ? 1 : HasScale(codec) ? codec.scale_bits / 8 : 0; }

void Put(uint64_t value, int bytes, uint8_t* to) {
  for (int i = 0; i < bytes; ++i) to[i] = static_cast<uint8_t>(value >> (8 * i));
}

uint64_t Get(const uint8_t* from, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) value |= static_cast<uint64_t>(from[i]) << (8 * i);
  return value;
}

// Writes the code of element p of a block; codes have w bits and are in planes.
void PutCode(int p, int w, int block, uint32_t code, uint8_t* to) {
  const int m = block * w / 8;
  to[p % m] = static_cast<uint8_t>(to[p % m] | code << (p / m * w));
}

uint32_t GetCode(int p, int w, int block, const uint8_t* from) {
  const int m = block * w / 8;
  return (from[p % m] >> (p / m * w)) & ((1u << w) - 1);
}

float MakeScale(const tfpar_codec& codec, float s) {
  const float rounded = codec.scale_bits == 16 ? FromBf16(Bf16(s)) : Short(s);
  if (rounded <= kSmallestNormal) return 0.0f;
  return std::min(rounded, 0x1p126f);
}

void PutScale(const tfpar_codec& codec, float scale, uint8_t* to) {
  const uint32_t bits = std::isnan(scale) ? 0x7FC00000u : Bits(scale);
  Put(codec.scale_bits == 16 ? bits >> 16 : bits, codec.scale_bits / 8, to);
}

float GetScale(const tfpar_codec& codec, const uint8_t* from) {
  const uint32_t bits = static_cast<uint32_t>(Get(from, codec.scale_bits / 8));
  return static_cast<float>(In(FromBits(codec.scale_bits == 16 ? bits << 16 : bits)));
}

float SumByHalving(Floats a) {
  while (a.size() > 1) {
    const size_t half = a.size() / 2;
    for (size_t i = 0; i < half; ++i) a[i] = Add(a[i], a[i + half]);
    a.resize(half);
  }
  return a[0];
}

bool AllFinite(const Floats& v) {
  return std::all_of(v.begin(), v.end(), [](float value) { return std::isfinite(value); });
}

float LargestMagnitude(const Floats& v) {
  float a = 0.0f;
  for (float value : v) a = std::max(a, std::fabs(value));
  return a;
}

uint32_t RandomNumber(const tfpar_codec& codec, int64_t g, int p) {
  const int lanes = codec.block / 8;
  const uint64_t c = static_cast<uint64_t>(g) * static_cast<uint64_t>(lanes) + static_cast<uint64_t>(p % lanes);
  const auto low = [](uint64_t v) { return static_cast<uint32_t>(v); };
  const auto high = [](uint64_t v) { return static_cast<uint32_t>(v >> 32); };
  const auto words = Philox({low(c), high(c), low(codec.step), high(codec.step)}, {low(codec.seed), high(codec.seed)});
  const int which = p / lanes;
  return (words[which / 2] >> (which % 2 * 16)) & 0xFFFF;
}

void EncodeFp8(const Floats& v, uint8_t* code, uint8_t* scale) {
  const float a = LargestMagnitude(v);
  const bool finite = AllFinite(v) && a <= 448 * 0x1p119f;
  if (!finite || a == 0.0f) {
    *scale = finite ? 0 : 255;
    return;
  }
  const int exponent = static_cast<int>(Bits(a) >> 23) - 127;
  const int e = std::max(-126, exponent - 8 + ((Bits(a) & 0x7FFFFF) > 0x600000 ? 1 : 0));
  *scale = static_cast<uint8_t>(e + 127);
  for (size_t p = 0; p < v.size(); ++p) {
    const int magnitude = Nearest(E4M3Magnitudes(), std::ldexp(std::fabs(static_cast<double>(v[p])), -e));
    code[p] = static_cast<uint8_t>(magnitude == 0 ? 0 : magnitude | (v[p] < 0 ? 0x80 : 0));
  }
}

void EncodeIntegers(const tfpar_codec& codec, const Floats& v, int64_t g, uint8_t* code, uint8_t* scale_bytes) {
  const int bits = IntegerBits(codec), largest = bits == 8 ? 127 : bits == 4 ? 7 : 1;
  const bool finite = AllFinite(v);
  const float a = finite ? LargestMagnitude(v) : 0.0f;
  const float scale = finite ? MakeScale(codec, largest == 1 ? a : Mul(a, static_cast<float>(1.0 / largest))) : kNaN;
  PutScale(codec, scale, scale_bytes);
  const float inverse = scale > 0 ? static_cast<float>(1.0 / scale) : 0.0f;
  for (int p = 0; p < codec.block; ++p) {
    int q = 0;
    if (finite) {
      const float t = Mul(v[p], inverse);
      if (codec.stochastic) {
        const int64_t fixed = std::llrint(static_cast<double>(t) * 65536);
        q = static_cast<int>(std::floor(static_cast<double>(fixed + RandomNumber(codec, g, p)) / 65536));
      } else {
        q = static_cast<int>(std::llrint(static_cast<double>(t)));
      }
      q = std::max(-largest, std::min(largest, q));
    }
    const int stored = bits == 8 ? q & 0xFF : bits == 4 ? q + 8 : q + 2;
    PutCode(p, bits, codec.block, static_cast<uint32_t>(stored), code);
  }
}

void EncodeSign(const tfpar_codec& codec, const Floats& v, int exist, uint8_t* code, uint8_t* scale_bytes) {
  Floats magnitudes;
  for (float value : v) magnitudes.push_back(std::fabs(value));
  const float total = SumByHalving(magnitudes);
  float scale = kNaN;
  if (std::isfinite(total)) scale = exist == 0 ? 0.0f : MakeScale(codec, Mul(total, static_cast<float>(1.0 / exist)));
  PutScale(codec, scale, scale_bytes);
  for (int p = 0; p < codec.block; ++p) PutCode(p, 1, codec.block, v[p] < 0 ? 1 : 0, code);
}

void EncodeTopK(const tfpar_codec& codec, const Floats& v, uint8_t* code) {
  std::vector<int> order(v.size());
  std::iota(order.begin(), order.end(), 0);
  const bool finite = AllFinite(v);
  if (finite) {
    std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return std::fabs(v[i]) > std::fabs(v[j]); });
  }
  std::sort(order.begin(), order.begin() + codec.keep);
  for (int i = 0; i < codec.keep; ++i) {
    Put(static_cast<uint64_t>(order[i]), 2, code + 2 * i);
    Put(finite ? Bf16(v[order[i]]) : 0x7FC0, 2, code + 2 * codec.keep + 2 * i);
  }
}

float HalfValue(uint16_t code) {
  const float sign = code & 0x8000 ? -1.0f : 1.0f;
  if ((code & 0x7C00) == 0x7C00) return code & 0x3FF ? kNaN : sign * std::numeric_limits<float>::infinity();
  return sign * static_cast<float>(HalfMagnitudes()[code & 0x7FFF]);
}

float Fp8Value(uint8_t code, uint8_t scale) {
  if (scale == 255 || (code & 0x7F) == 0x7F) return kNaN;
  if (scale == 0) return 0.0f;
  const double value = std::ldexp(E4M3Magnitudes()[code & 0x7F], scale - 127);
  return Flush(Round(code & 0x80 ? -value : value));
}

Floats DecodeTopK(const tfpar_codec& codec, const uint8_t* code, bool* invalid) {
  Floats d(static_cast<size_t>(codec.block), 0.0f);
  bool whole = false;
  for (int i = 0; i < codec.keep; ++i) {
    const auto position = static_cast<int>(Get(code + 2 * i, 2));
    const float value = FromBf16(static_cast<uint16_t>(Get(code + 2 * codec.keep + 2 * i, 2)));
    if (i == 0) whole = std::isnan(value);
    if (position >= codec.block) {
      *invalid = true;
    } else {
      d[position] = Add(d[position], value);
    }
  }
  if (whole) d.assign(d.size(), kNaN);
  return d;
}

Floats DecodeBlock(const tfpar_codec& codec, const uint8_t* code, const uint8_t* scale_bytes, bool* invalid) {
  if (codec.kind == TFPAR_TOPK) return DecodeTopK(codec, code, invalid);
  Floats d;
  const int bits = IntegerBits(codec);
  const float scale = HasScale(codec) ? GetScale(codec, scale_bytes) : 0.0f;
  for (int p = 0; p < codec.block; ++p) {
    if (codec.kind == TFPAR_BF16) {
      d.push_back(FromBf16(static_cast<uint16_t>(Get(code + 2 * p, 2))));
    } else if (codec.kind == TFPAR_FP16) {
      d.push_back(HalfValue(static_cast<uint16_t>(Get(code + 2 * p, 2))));
    } else if (codec.kind == TFPAR_FP8) {
      d.push_back(Fp8Value(code[p], *scale_bytes));
    } else if (codec.kind == TFPAR_SIGN) {
      d.push_back(GetCode(p, 1, codec.block, code) ? Sub(0.0f, scale) : scale);
    } else {
      const int stored = static_cast<int>(GetCode(p, bits, codec.block, code));
      const int q = bits == 8 ? static_cast<int8_t>(stored) : stored - (bits == 4 ? 8 : 2);
      d.push_back(Mul(static_cast<float>(q), scale));
    }
  }
  return d;
}

bool BlockIsFinite(const tfpar_codec& codec, const Floats& v) {
  if (codec.kind == TFPAR_FP8) return AllFinite(v) && LargestMagnitude(v) <= 448 * 0x1p119f;
  if (codec.kind != TFPAR_SIGN) return AllFinite(v);
  Floats magnitudes;
  for (float value : v) magnitudes.push_back(std::fabs(value));
  return std::isfinite(SumByHalving(magnitudes));
}

void EncodeBlock(const tfpar_codec& codec, const Floats& v, int64_t g, int exist, uint8_t* code, uint8_t* scale) {
  switch (codec.kind) {
    case TFPAR_BF16:
      for (int p = 0; p < codec.block; ++p) Put(Bf16(v[p]), 2, code + 2 * p);
      break;
    case TFPAR_FP16:
      for (int p = 0; p < codec.block; ++p) {
        const int magnitude = std::isfinite(v[p]) ? Nearest(HalfMagnitudes(), std::fabs(static_cast<double>(v[p]))) : 0x7E00;
        Put(static_cast<uint64_t>(magnitude | (v[p] < 0 && std::isfinite(v[p]) ? 0x8000 : 0)), 2, code + 2 * p);
      }
      break;
    case TFPAR_FP8:
      EncodeFp8(v, code, scale);
      break;
    case TFPAR_SIGN:
      EncodeSign(codec, v, exist, code, scale);
      break;
    case TFPAR_TOPK:
      EncodeTopK(codec, v, code);
      break;
    default:
      EncodeIntegers(codec, v, g, code, scale);
  }
}

}  // namespace

Encoded Encode(const tfpar_codec& codec, const Floats& x, const Floats& residual, int64_t begin, int64_t n) {
  const int64_t blocks = Blocks(codec, n), code_bytes = CodeBytes(codec), scale_bytes = ScaleBytes(codec);
  Encoded result;
  result.payload.assign(static_cast<size_t>((16 + blocks * (code_bytes + scale_bytes) + 15) / 16 * 16), 0);
  uint8_t* bytes = result.payload.data();
  Put(0x01504654, 4, bytes);
  bytes[4] = static_cast<uint8_t>(codec.kind + (codec.scale_bits == 32 ? 128 : 0));
  bytes[5] = static_cast<uint8_t>(std::ilogb(codec.block));
  Put(static_cast<uint64_t>(codec.keep), 2, bytes + 6);
  Put(static_cast<uint64_t>(n), 8, bytes + 8);
  result.residual.assign(x.size(), 0.0f);
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t at = b * codec.block;
    const auto exist = std::max<int64_t>(0, std::min<int64_t>(codec.block, static_cast<int64_t>(x.size()) - at));
    Floats v(static_cast<size_t>(codec.block), 0.0f);
    for (int64_t i = 0; i < exist; ++i) v[i] = Flush(Add(x[at + i], residual.empty() ? 0.0f : residual[at + i]));
    uint8_t* code = bytes + 16 + b * code_bytes;
    uint8_t* scale = bytes + 16 + blocks * code_bytes + b * scale_bytes;
    EncodeBlock(codec, v, begin / codec.block + b, static_cast<int>(exist), code, scale);
    bool invalid = false;
    const Floats d = DecodeBlock(codec, code, scale, &invalid);
    const bool cast = codec.kind == TFPAR_BF16 || codec.kind == TFPAR_FP16;
    const bool block_finite = BlockIsFinite(codec, v);
    double norms[2] = {0, 0};
    for (int64_t i = 0; i < exist; ++i) {
      const bool finite = cast ? std::isfinite(v[i]) : block_finite;
      const float old = residual.empty() ? 0.0f : residual[at + i];
      result.residual[at + i] = finite ? Flush(Sub(v[i], d[i])) : old;
      norms[0] += In(x[at + i]) * In(x[at + i]);
      norms[1] += In(result.residual[at + i]) * In(result.residual[at + i]);
    }
    result.norms.insert(result.norms.end(), norms, norms + 2);
  }
  return result;
}

Floats Decode(const tfpar_codec& codec, int64_t n, const Bytes& payload, bool* invalid) {
  const int64_t blocks = Blocks(codec, n), code_bytes = CodeBytes(codec), scale_bytes = ScaleBytes(codec);
  Floats values;
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* code = payload.data() + 16 + b * code_bytes;
    const Floats d = DecodeBlock(codec, code, payload.data() + 16 + blocks * code_bytes + b * scale_bytes, invalid);
    values.insert(values.end(), d.begin(), d.end());
  }
  return values;
}

Floats DecodeSum(const tfpar_codec& codec, int64_t n, const std::vector<Bytes>& payloads, float factor, bool* invalid) {
  Floats sum = Decode(codec, n, payloads[0], invalid);
  for (size_t peer = 1; peer < payloads.size(); ++peer) {
    const Floats d = Decode(codec, n, payloads[peer], invalid);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] = Add(sum[i], d[i]);
  }
  if (factor != 1.0f) {
    for (float& value : sum) {
      value = Mul(value, factor);
      if (std::fabs(value) <= kSmallestNormal) value = 0.0f;
    }
  }
  sum.resize(static_cast<size_t>(n));
  return sum;
}

}  // namespace oracle
