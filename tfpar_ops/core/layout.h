// The header of a payload and the offsets of its parts (FORMAT.md, "Layout"), for the codecs on the CPU and on CUDA
// devices.
//
// All functions are static: files compiled for different instruction sets include them, and the linker must not keep
// one AVX-512 copy for all of these files.
#ifndef TFPAR_OPS_CORE_LAYOUT_H_
#define TFPAR_OPS_CORE_LAYOUT_H_

#include "codec.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "payloads are little-endian, and written as the processor has them");

namespace tfpar {

constexpr int64_t kHeaderBytes = 16;

// A row of formats.h.
enum class Codes : int32_t { EVERY, KEPT };
enum class ScaleType : int32_t { NONE, BYTE, FLOAT };
enum class Rounding : int32_t { NEAREST, STOCHASTIC };

struct Format {
  int32_t number;
  const char* name;
  int32_t code_bits;
  Codes codes;
  ScaleType scale;
  int32_t smallest_block, largest_block;
  Rounding rounding;
};

#define TFPAR_FORMAT_ROW(ID, name, number, code_bits, codes, scale, smallest_block, largest_block, rounding, Kernel) \
  {number, name, code_bits, Codes::codes, ScaleType::scale, smallest_block, largest_block, Rounding::rounding},
static constexpr Format kFormats[] = {TFPAR_FORMATS(TFPAR_FORMAT_ROW)};
#undef TFPAR_FORMAT_ROW

// The format with that number; null if there is none.
static inline const Format* FindFormat(int64_t number) {
  for (const Format& format : kFormats) {
    if (format.number == number) return &format;
  }
  return nullptr;
}

// Bytes that the codes of one block take in the payload. Here and below, the codec must be valid.
static inline int64_t CodeBytes(const tfpar_codec& codec) {
  const Format& format = *FindFormat(codec.kind);
  return int64_t{format.codes == Codes::KEPT ? codec.keep : codec.block} * format.code_bits / 8;
}

static inline int64_t ScaleBytes(const tfpar_codec& codec) {
  return FindFormat(codec.kind)->scale == ScaleType::BYTE ? 1 : codec.scale_bits / 8;
}

// Here and below, n must not be negative.
static inline int64_t NumBlocks(const tfpar_codec& codec, int64_t n) { return n / codec.block + (n % codec.block != 0); }

// Offsets in bytes of the scales and of the closing zeros, for a payload whose length does not overflow.
static inline int64_t ScalesAt(const tfpar_codec& codec, int64_t n) {
  return kHeaderBytes + NumBlocks(codec, n) * CodeBytes(codec);
}

static inline int64_t PaddingAt(const tfpar_codec& codec, int64_t n) {
  return ScalesAt(codec, n) + NumBlocks(codec, n) * ScaleBytes(codec);
}

constexpr uint32_t kFloatScales = 128;  // added to the kind in the header if scales are float32

struct Header {
  uint32_t word[4];
};

static inline Header MakeHeader(const tfpar_codec& codec, int64_t n) {
  const uint32_t kind = static_cast<uint32_t>(codec.kind) + (codec.scale_bits == 32 ? kFloatScales : 0u);
  const uint32_t log2_block = static_cast<uint32_t>(__builtin_ctz(static_cast<unsigned>(codec.block)));
  const uint64_t elements = static_cast<uint64_t>(n);
  return {{0x01504654u,  // "TFP", version 1
           kind | log2_block << 8 | static_cast<uint32_t>(codec.keep) << 16, static_cast<uint32_t>(elements),
           static_cast<uint32_t>(elements >> 32)}};
}

}  // namespace tfpar

#endif  // TFPAR_OPS_CORE_LAYOUT_H_
