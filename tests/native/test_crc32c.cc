// Checksums of records: the test vectors of RFC 3720, and every length compared with a bitwise division.
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "../../tfpar_ops/core/crc32c.h"
#include "check.h"

namespace {

uint32_t Unmasked(const std::string& data) {
  const void* pointer = data.data();
  const int64_t bytes = static_cast<int64_t>(data.size());
  uint32_t crc = 0;
  tfpar_masked_crc32c(&pointer, &bytes, 1, &crc);
  crc -= 0xa282ead8u;
  return crc >> 17 | crc << 15;
}

uint32_t BitByBit(const std::string& data) {
  uint32_t crc = ~0u;
  for (const char c : data) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82f63b78u : 0u);
  }
  return ~crc;
}

}  // namespace

TEST(Crc32cVectorsOfRfc3720) {
  std::string rising(32, '\0');
  for (int i = 0; i < 32; ++i) rising[i] = static_cast<char>(i);
  const std::string falling(rising.rbegin(), rising.rend());
  CHECK(Unmasked(std::string(32, '\0')) == 0x8a9136aau, "zeros");
  CHECK(Unmasked(std::string(32, '\xff')) == 0x62a8ab43u, "ones");
  CHECK(Unmasked(rising) == 0x46dd794eu, "rising");
  CHECK(Unmasked(falling) == 0x113fdb5cu, "falling");
  CHECK(Unmasked("123456789") == 0xe3069283u, "digits");
}

TEST(Crc32cOfEveryLengthAndAlignment) {
  std::mt19937 random(1);
  std::string data(300, '\0');
  for (char& c : data) c = static_cast<char>(random());
  for (size_t begin = 0; begin < 9; ++begin) {
    for (size_t length = 0; begin + length <= data.size(); ++length) {
      const std::string part = data.substr(begin, length);
      CHECK(Unmasked(part) == BitByBit(part), std::to_string(begin) + "+" + std::to_string(length));
    }
  }
}

TEST(Crc32cOfSeveralBuffers) {
  const std::vector<std::string> parts = {"a", "", std::string(1000, 'x')};
  std::vector<const void*> data;
  std::vector<int64_t> bytes;
  for (const std::string& part : parts) {
    data.push_back(part.data());
    bytes.push_back(static_cast<int64_t>(part.size()));
  }
  std::vector<uint32_t> crcs(3), alone(3);
  tfpar_masked_crc32c(data.data(), bytes.data(), 3, crcs.data());
  for (int i = 0; i < 3; ++i) tfpar_masked_crc32c(&data[i], &bytes[i], 1, &alone[i]);
  CHECK(crcs == alone, "together or alone");
}
