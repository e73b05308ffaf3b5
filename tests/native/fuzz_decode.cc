// Fuzzes the functions that receive bytes from other machines (header check, decode-sum, re-encode), and the encoding
// of decoded values. Payloads and vectors have exactly the bytes they need, so that AddressSanitizer detects every
// access past their ends.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../../tfpar_ops/core/layout.h"

namespace {

// Takes numbers from the front of the input; returns zeros when it is used up.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  uint32_t Number(int bytes) {
    uint32_t number = 0;
    for (int i = 0; i < bytes; ++i) number = number << 8 | (size_ > 0 ? (--size_, *data_++) : 0u);
    return number;
  }
  int64_t Below(int64_t limit) { return limit > 0 ? static_cast<int64_t>(Number(4)) % limit : 0; }
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  const uint8_t* data_;
  size_t size_;
};

tfpar_codec Options(Input* input) {
  constexpr int kCount = sizeof tfpar::kFormats / sizeof *tfpar::kFormats;
  const tfpar::Format& format = tfpar::kFormats[input->Number(1) % kCount];
  const uint32_t more = input->Number(1);
  tfpar_codec codec = {format.number, format.smallest_block, 0, 0, 0, 11, 5};
  for (uint32_t doubled = more & 15; doubled > 0 && codec.block < format.largest_block; --doubled) codec.block *= 2;
  if (format.rounding == tfpar::Rounding::STOCHASTIC) codec.stochastic = static_cast<int>(more >> 5 & 1);
  if (format.scale == tfpar::ScaleType::FLOAT) codec.scale_bits = more & 64 ? 16 : 32;
  if (format.codes == tfpar::Codes::KEPT) codec.keep = 1 + static_cast<int>(input->Below(codec.block));
  return codec;
}

void Expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not true: %s\n", what);
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  const tfpar_codec codec = Options(&input);
  char message[64];  // shorter than some messages
  Expect(tfpar_codec_check(&codec, message, sizeof message) == 0, "options are valid");
  const uint32_t how = input.Number(1);
  const int64_t n = input.Below(how & 24 ? 3000 : 30000), peers = 1 + input.Below(5);
  const int64_t bytes = tfpar_payload_bytes(&codec, n), blocks = tfpar_num_blocks(&codec, n);

  // The unmodified input as a payload. If it passes the check, decoding it must be safe.
  const std::vector<uint8_t> foreign(input.data(), input.data() + input.size());
  const bool passes = tfpar_payload_check(&codec, n, foreign.data(), static_cast<int64_t>(foreign.size()), message,
                                          sizeof message) == 0;
  Expect(std::memchr(message, 0, sizeof message) != nullptr || passes, "messages end");

  // After a valid header, the bytes of the input, repeated as needed and from a different start for each peer.
  std::vector<std::vector<uint8_t>> payloads;
  std::vector<const void*> pointers;
  for (int64_t peer = 0; peer < peers; ++peer) {
    if (passes && peer == 0) {
      payloads.push_back(foreign);
    } else {
      std::vector<uint8_t> payload(static_cast<size_t>(bytes));
      for (size_t i = 0; i < payload.size() && !foreign.empty(); ++i) {
        payload[i] = foreign[(i + static_cast<size_t>(peer) * 7) % foreign.size()];
      }
      tfpar_write_frame(&codec, n, payload.data());
      payloads.push_back(payload);
    }
    Expect(tfpar_payload_check(&codec, n, payloads.back().data(), bytes, message, sizeof message) == 0, "header is right");
  }
  for (const auto& payload : payloads) pointers.push_back(payload.data());

  // The vector has two parts and ends before, at or after the end of the payload.
  const int64_t length = input.Below(2 * n + 3), cut = input.Below(length + 1), begin = codec.block * input.Below(3);
  const std::unique_ptr<float[]> first(new float[static_cast<size_t>(cut)]());
  const std::unique_ptr<float[]> second(new float[static_cast<size_t>(length - cut)]());
  float* parts[] = {first.get(), second.get()};
  const int64_t offset[] = {0, cut, length};
  const tfpar_mutable_vector out = {parts, offset, 2};
  const float factor = how & 1 ? 1.0f : 0.3f;
  const int64_t middle = input.Below(blocks + 1);  // two threads would take a range of blocks each
  int invalid = tfpar_decode_sum(&codec, n, pointers.data(), peers, factor, &out, begin, middle, blocks);
  invalid |= tfpar_decode_sum(&codec, n, pointers.data(), peers, factor, &out, begin, 0, middle);
  Expect(invalid == 0 || codec.kind == TFPAR_TOPK, "only positions can be invalid");

  const int64_t valid = input.Below(n + 1);
  std::vector<float> residual(static_cast<size_t>(valid), 1e-3f);
  std::vector<uint8_t> again(static_cast<size_t>(bytes));
  std::vector<double> norms(static_cast<size_t>(2 * blocks));
  tfpar_write_frame(&codec, n, again.data());
  const bool keep = (how & 2) != 0;
  Expect(tfpar_recode(&codec, n, pointers.data(), peers, factor, valid, begin, keep ? residual.data() : nullptr,
                      keep ? residual.data() : nullptr, again.data(), 0, blocks, how & 4 ? norms.data() : nullptr) ==
             invalid,
         "both see the same positions");
  bool outside = false;
  for (const void* payload : pointers) {
    outside |= tfpar_positions_check(&codec, payload, 0, blocks, message, sizeof message) != 0;
  }
  Expect(outside == (invalid != 0), "and so does who only looks at positions");

  // A payload that was encoded here must always decode: that of the sum, and that of the decoded vector, each with a
  // residual.
  const void* own = again.data();
  const auto expect_valid = [&] {
    Expect(tfpar_payload_check(&codec, n, own, bytes, message, sizeof message) == 0, "own header is right");
    Expect(tfpar_positions_check(&codec, own, 0, blocks, message, sizeof message) == 0, "own positions are valid");
    Expect(tfpar_decode_sum(&codec, n, &own, 1, 1.0f, &out, begin, 0, blocks) == 0, "and found to be when decoding");
  };
  expect_valid();
  const float* decoded[] = {first.get(), second.get()};
  const tfpar_vector x = {decoded, offset, 2};
  std::vector<float> left(static_cast<size_t>(std::max<int64_t>(0, std::min(n, length - begin))), 1e-3f);
  tfpar_write_frame(&codec, n, again.data());
  for (int part = 0; part < 2; ++part) {
    tfpar_encode(&codec, &x, begin, n, keep ? left.data() : nullptr, keep ? left.data() : nullptr, again.data(),
                 part == 0 ? middle : 0, part == 0 ? blocks : middle,
                 how & 4 ? norms.data() + 2 * (part == 0 ? middle : 0) : nullptr);
  }
  expect_valid();
  return 0;
}
