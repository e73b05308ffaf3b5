// Options, sizes and headers: which ones are rejected, and the messages.
#include <cstring>
#include <string>

#include "cases.h"
#include "check.h"

namespace {

using cases::Bytes;

std::string Refusal(const tfpar_codec& codec) {
  char message[200] = "";
  const int refused = tfpar_codec_check(&codec, message, sizeof message);
  return refused ? message : "";
}

std::string Refusal(const tfpar_codec& codec, int64_t n, const Bytes& payload, int64_t bytes) {
  char message[200] = "";
  const int refused = tfpar_payload_check(&codec, n, payload.data(), bytes, message, sizeof message);
  return refused ? message : "";
}

bool Contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST(ValidOptionsAreTaken) {
  for (const tfpar_codec& codec : cases::All()) CHECK(Refusal(codec).empty(), Refusal(codec));
}

TEST(OtherOptionsAreRefusedByName) {
  const struct {
    tfpar_codec codec;
    const char* option;
  } wrong[] = {
      {{0, 512, 0, 0, 0, 0, 0}, "kind=0"},
      {{127, 512, 0, 0, 0, 0, 0}, 
       "codec: kind=127; allowed are 1 bf16, 2 fp16, 3 fp8, "},
      {{TFPAR_BF16, 512, 0, 0, 0, 0, 0}, "codec bf16: block=512; allowed is 1024"},
      {{TFPAR_FP8, 8192, 0, 0, 0, 0, 0}, "codec fp8: block=8192; allowed are powers of two, 64 to 4096"},
      {{TFPAR_FP8, 512, 0, 16, 0, 0, 0},
       "codec fp8: scale_bits=16; must be 0, it is an option of int8, int4, "},
      {{TFPAR_INT4, 500, 0, 16, 0, 0, 0}, "block=500"},
      {{TFPAR_INT4, 32, 0, 16, 0, 0, 0}, "block=32"},
      {{TFPAR_INT4, -512, 0, 16, 0, 0, 0}, "block=-512"},
      {{TFPAR_INT4, 512, 0, 8, 0, 0, 0}, "scale_bits=8"},
      {{TFPAR_INT4, 512, 1, 16, 0, 0, 0}, "codec int4: keep=1; must be 0, it is an option of topk"},
      {{TFPAR_INT4, 512, 0, 16, 2, 0, 0}, "stochastic=2"},
      {{TFPAR_SIGN, 512, 0, 16, 1, 0, 0},
       "codec sign: stochastic=1; must be 0, it is an option of int8, int4, "},
      {{TFPAR_TOPK, 4096, 0, 0, 0, 0, 0}, "keep=0"},
      {{TFPAR_TOPK, 4096, 4097, 0, 0, 0, 0}, "keep=4097"},
      {{TFPAR_TOPK, 32768, 1, 0, 0, 0, 0}, "block=32768"},
  };
  for (const auto& one : wrong) CHECK(Contains(Refusal(one.codec), one.option), Refusal(one.codec) + " for " + one.option);
}

TEST(SizesFollowFromTheFormat) {
  for (const tfpar_codec& codec : cases::All()) {
    for (int64_t n : {int64_t{0}, int64_t{1}, int64_t{64}, int64_t{1000}, int64_t{123457}}) {
      const auto expected = oracle::Encode(codec, cases::Floats(), {}, 0, n);
      CHECK(tfpar_payload_bytes(&codec, n) == static_cast<int64_t>(expected.payload.size()), cases::Name(codec));
      CHECK(tfpar_num_blocks(&codec, n) == (n + codec.block - 1) / codec.block, cases::Name(codec));
    }
    CHECK(tfpar_payload_bytes(&codec, -1) == -1, cases::Name(codec));
  }
  const tfpar_codec cast = {TFPAR_BF16, 1024, 0, 0, 0, 0, 0};
  CHECK(tfpar_payload_bytes(&cast, INT64_MAX) == -1, "does not fit");
  CHECK(tfpar_payload_bytes(&cast, INT64_MAX / 4) > INT64_MAX / 4, "fits");
}

TEST(HeadersOfOthersAreRefused) {
  for (const tfpar_codec& codec : cases::All()) {
    const int64_t n = 1000;
    Bytes payload(static_cast<size_t>(tfpar_payload_bytes(&codec, n)), 0xEE);
    tfpar_write_frame(&codec, n, payload.data());
    const auto bytes = static_cast<int64_t>(payload.size());
    CHECK(Refusal(codec, n, payload, bytes).empty(), Refusal(codec, n, payload, bytes));
    for (int byte = 0; byte < 16; ++byte) {
      for (int bit = 0; bit < 8; ++bit) {
        Bytes wrong = payload;
        wrong[byte] = static_cast<uint8_t>(wrong[byte] ^ (1 << bit));
        CHECK(!Refusal(codec, n, wrong, bytes).empty(), cases::Name(codec) + ", header byte " + std::to_string(byte));
      }
    }
    if (codec.kind == TFPAR_INT4) {
      Bytes wrong = payload;
      wrong[4] ^= 5 ^ 6;
      const std::string scales = codec.scale_bits == 32 ? ", float32 scales)" : ")";
      CHECK(Contains(Refusal(codec, n, wrong, bytes), "(int2" + scales), Refusal(codec, n, wrong, bytes));
      CHECK(Contains(Refusal(codec, n, wrong, bytes), "(int4" + scales), Refusal(codec, n, wrong, bytes));
      wrong[0] = 0x55;
      CHECK(Contains(Refusal(codec, n, wrong, bytes), "magic is 0x01504655, expected 0x01504654"), "magic");
    }
    CHECK(Contains(Refusal(codec, n, payload, bytes - 16), std::to_string(bytes)), "length in the message");
    CHECK(!Refusal(codec, n, payload, bytes + 16).empty() && !Refusal(codec, n, payload, 0).empty(), cases::Name(codec));
    CHECK(!Refusal(codec, n + 1, payload, tfpar_payload_bytes(&codec, n + 1)).empty(), cases::Name(codec));
    CHECK(!Refusal(codec, -1, payload, bytes).empty(), cases::Name(codec));
    for (const tfpar_codec& other : cases::All()) {
      if (cases::Name(other) == cases::Name(codec)) continue;
      tfpar_codec nearest = other;  // rounding is not part of the format
      nearest.stochastic = codec.stochastic;
      if (cases::Name(nearest) == cases::Name(codec)) continue;
      CHECK(!Refusal(other, n, payload, bytes).empty(), cases::Name(codec) + " taken for " + cases::Name(other));
    }
  }
}

// A wrong position is found in every entry of the blocks in the range, and in no other block; values are not taken for
// positions.
TEST(PositionsOutsideTheirBlockAreFound) {
  const tfpar_codec codec = {TFPAR_TOPK, 64, 3, 0, 0, 0, 0};
  const int64_t n = 300;
  Bytes payload(static_cast<size_t>(tfpar_payload_bytes(&codec, n)), 0);
  tfpar_write_frame(&codec, n, payload.data());
  for (int block = 0; block < 5; ++block) {
    for (int entry = 0; entry < 6; ++entry) {
      Bytes wrong = payload;
      wrong[static_cast<size_t>(16 + 12 * block + 2 * entry)] = 70;
      for (int first = 0; first <= 5; ++first) {
        for (int last = first; last <= 5; ++last) {
          char message[200] = "";
          const bool refused = tfpar_positions_check(&codec, wrong.data(), first, last, message, sizeof message) != 0;
          CHECK(refused == (entry < 3 && first <= block && block < last), message);
          const std::string expected =
              "topk position 70, in block " + std::to_string(block) + ", is not below the block size, 64";
          CHECK(!refused || message == expected, message);
        }
      }
    }
  }
  const tfpar_codec other = {TFPAR_SIGN, 64, 0, 16, 0, 0, 0};
  CHECK(tfpar_positions_check(&other, payload.data(), 0, 5, nullptr, 0) == 0, "no positions");
}
