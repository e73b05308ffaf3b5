// The parts of a codec that both operations and kernels need: its attributes, and the division of a vector into shards.
#ifndef TFPAR_OPS_OPS_CODEC_ATTRS_H_
#define TFPAR_OPS_OPS_CODEC_ATTRS_H_

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "tensorflow/core/platform/errors.h"
#include "tfpar_ops/core/codec.h"
#include "tfpar_ops/core/layout.h"

// The attributes of an operation that needs a codec. TensorFlow checks the strings, `ReadCodec` the rest.
#define TFPAR_CODEC_ATTRS                          \
  Attr(tfpar::KindAttr())                          \
      .Attr("block: int")                          \
      .Attr("keep: int = 0")                       \
      .Attr("scale: {'bf16', 'float32'} = 'bf16'") \
      .Attr("rounding: {'nearest', 'stochastic'} = 'nearest'")

namespace tfpar {

// "kind: {'bf16', 'fp16', ...}", with the names of all formats.
inline std::string KindAttr() {
  std::string names;
  for (const Format& format : kFormats) absl::StrAppend(&names, names.empty() ? "'" : ", '", format.name, "'");
  return absl::StrCat("kind: {", names, "}");
}

// The format with that name; null if there is none.
inline const Format* FindFormat(absl::string_view name) {
  for (const Format& format : kFormats) {
    if (name == format.name) return &format;
  }
  return nullptr;
}

template <typename... Args>
absl::Status Invalid(const Args&... args) {
  return absl::InvalidArgumentError(absl::StrCat(args...));
}

// Reads the codec from the attributes of an OpKernelConstruction or an InferenceContext, and checks it.
template <typename Context>
absl::Status ReadCodec(Context* context, tfpar_codec* codec) {
  std::string kind, scale, rounding;
  int64_t block, keep;
  TF_RETURN_IF_ERROR(context->GetAttr("kind", &kind));
  TF_RETURN_IF_ERROR(context->GetAttr("block", &block));
  TF_RETURN_IF_ERROR(context->GetAttr("keep", &keep));
  TF_RETURN_IF_ERROR(context->GetAttr("scale", &scale));
  TF_RETURN_IF_ERROR(context->GetAttr("rounding", &rounding));
  // Clamps instead of truncating, so that a value beyond 32 bits is still rejected rather than becoming a valid one.
  const auto narrow = [](int64_t value) {
    return static_cast<int32_t>(std::clamp<int64_t>(value, INT32_MIN, INT32_MAX));
  };
  *codec = tfpar_codec{};
  const Format* format = FindFormat(kind);
  if (format == nullptr) {
    return Invalid("codec: kind='", kind, "' is not one of those that ", KindAttr(), " lists");
  }
  codec->kind = format->number;
  codec->block = narrow(block);
  codec->keep = narrow(keep);
  // bf16 is the attribute's default, also for kinds without float scales.
  codec->scale_bits = scale == "float32" ? 32 : format->scale == ScaleType::FLOAT ? 16 : 0;
  codec->stochastic = rounding == "stochastic";
  char message[256];
  if (tfpar_codec_check(codec, message, sizeof(message)) != 0) {
    return Invalid(message);
  }
  return absl::OkStatus();
}

// Adds to the number of elements of a vector.
inline absl::Status AddElements(int64_t elements, int64_t* total) {
  if (__builtin_add_overflow(*total, elements, total)) {
    return Invalid("the tensors have more elements together than can be counted");
  }
  return absl::OkStatus();
}

// A vector of `total` elements divided into `count` shards of `elements` each. The last shards may reach past its end,
// or lie entirely past it.
struct Shards {
  int64_t count = 0;
  int64_t elements = 0;
  int64_t total = 0;
  int64_t words = 0;  // 4-byte words in the payload of one shard

  // How many elements of shard `i` exist.
  int64_t valid(int64_t i) const { return std::clamp<int64_t>(total - i * elements, 0, elements); }
};

// The number of words in the payload of `elements` elements.
inline absl::Status PayloadWords(const tfpar_codec& codec, int64_t elements, int64_t* words) {
  const int64_t bytes = tfpar_payload_bytes(&codec, elements);
  if (bytes < 0) {
    return Invalid("no payload can hold ", elements, " elements");
  }
  *words = bytes / 4;
  return absl::OkStatus();
}

// `requested` is the attribute shard_elements: 0 for the smallest shards that hold `total` elements.
inline absl::Status MakeShards(const tfpar_codec& codec, int64_t total, int64_t count, int64_t requested,
                               Shards* shards) {
  if (count < 1) {
    return Invalid("shards=", count, " is not at least 1");
  }
  const int64_t least = total / count + (total % count != 0);
  int64_t elements = requested;
  if (requested == 0) {
    elements = count == 1 ? total : (least + codec.block - 1) / codec.block * codec.block;
  } else if (requested < least) {
    return Invalid("shard_elements=", requested, ": ", count, " shards of it do not hold the ", total,
                   " elements; at least ", least, " are needed, or 0 for the default");
  } else if (count > 1 && requested % codec.block != 0) {
    return Invalid("shard_elements=", requested, " is not a multiple of the block, ", codec.block);
  }
  *shards = Shards{count, elements, total, 0};
  return PayloadWords(codec, elements, &shards->words);
}

}  // namespace tfpar

#endif  // TFPAR_OPS_OPS_CODEC_ATTRS_H_
