// The header of a payload and where its parts are (FORMAT.md, "Layout"), for the codecs on the CPU and on CUDA devices.
//
// All functions are static: files compiled for different instruction sets include them, and the linker must not keep an
// AVX-512 copy of one for all.
#ifndef TFPAR_OPS_CORE_LAYOUT_H_
#define TFPAR_OPS_CORE_LAYOUT_H_

#include "codec.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "payloads are little-endian, and written as the processor has them");

namespace tfpar {

constexpr int64_t kHeaderBytes = 16;

// Bytes that one block takes in the payload.
static inline int64_t CodeBytes(const tfpar_codec& codec) {
  switch (codec.kind) {
    case TFPAR_QUANTIZE:
      return codec.block * codec.bits / 8;
    case TFPAR_SIGN:
      return codec.block / 8;
    case TFPAR_TOPK:
      return 4 * static_cast<int64_t>(codec.keep);
    default:
      return codec.kind == TFPAR_FP8 ? codec.block : 2 * static_cast<int64_t>(codec.block);
  }
}

static inline int64_t ScaleBytes(const tfpar_codec& codec) { return codec.kind == TFPAR_FP8 ? 1 : codec.scale_bits / 8; }

// n is not negative, here and below.
static inline int64_t NumBlocks(const tfpar_codec& codec, int64_t n) { return n / codec.block + (n % codec.block != 0); }

// Bytes before the scales, and before the closing zeros, of a payload whose length can be counted.
static inline int64_t ScalesAt(const tfpar_codec& codec, int64_t n) {
  return kHeaderBytes + NumBlocks(codec, n) * CodeBytes(codec);
}

static inline int64_t PaddingAt(const tfpar_codec& codec, int64_t n) {
  return ScalesAt(codec, n) + NumBlocks(codec, n) * ScaleBytes(codec);
}

// The number that the header has for kind and bits, without that for the scales.
static inline int FormatNumber(const tfpar_codec& codec) {
  switch (codec.kind) {
    case TFPAR_QUANTIZE:
      return codec.bits == 8 ? 4 : codec.bits == 4 ? 5 : 6;
    case TFPAR_SIGN:
      return 7;
    case TFPAR_TOPK:
      return 8;
    default:
      return codec.kind;
  }
}

constexpr uint32_t kFloatScales = 128;  // added to that number where scales are float32

struct Header {
  uint32_t word[4];
};

static inline Header MakeHeader(const tfpar_codec& codec, int64_t n) {
  const uint32_t kind = static_cast<uint32_t>(FormatNumber(codec)) + (codec.scale_bits == 32 ? kFloatScales : 0u);
  const uint32_t log2_block = static_cast<uint32_t>(__builtin_ctz(static_cast<unsigned>(codec.block)));
  const uint64_t elements = static_cast<uint64_t>(n);
  return {{0x01504654u,  // "TFP", version 1
           kind | log2_block << 8 | static_cast<uint32_t>(codec.keep) << 16, static_cast<uint32_t>(elements),
           static_cast<uint32_t>(elements >> 32)}};
}

}  // namespace tfpar

#endif  // TFPAR_OPS_CORE_LAYOUT_H_
