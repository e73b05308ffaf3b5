#include "crc32c.h"

#include <stddef.h>
#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

#include "codec.h"

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected

struct Tables {
  uint32_t of[8][256];
};

// of[k][b]: the remainder of byte b followed by k zero bytes.
constexpr Tables MakeTables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
    tables.of[0][byte] = crc;
  }
  for (int k = 1; k < 8; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables.of[k - 1][byte];
      tables.of[k][byte] = (before >> 8) ^ tables.of[0][before & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = MakeTables();

// Eight bytes at a time, a table for each ("slicing by 8", Kounavis and Berry 2005).
uint32_t Portable(uint32_t crc, const unsigned char* data, int64_t n) {
  const auto& of = kTables.of;
  for (; n >= 8; n -= 8, data += 8) {
    crc = of[7][data[0] ^ (crc & 0xff)] ^ of[6][data[1] ^ (crc >> 8 & 0xff)] ^ of[5][data[2] ^ (crc >> 16 & 0xff)] ^
          of[4][data[3] ^ (crc >> 24)] ^ of[3][data[4]] ^ of[2][data[5]] ^ of[1][data[6]] ^ of[0][data[7]];
  }
  for (; n > 0; --n, ++data) crc = (crc >> 8) ^ of[0][*data ^ (crc & 0xff)];
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t Hardware(uint32_t crc, const unsigned char* data, int64_t n) {
  uint64_t wide = crc;
  for (; n >= 8; n -= 8, data += 8) {
    uint64_t word;
    memcpy(&word, data, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  crc = static_cast<uint32_t>(wide);
  for (; n > 0; --n, ++data) crc = _mm_crc32_u8(crc, *data);
  return crc;
}
#endif

uint32_t Crc(const unsigned char* data, int64_t n, bool hardware) {
#if defined(__x86_64__)
  if (hardware) return ~Hardware(~0u, data, n);
#endif
  (void)hardware;
  return ~Portable(~0u, data, n);
}

}  // namespace

void tfpar_masked_crc32c(const void* const* data, const int64_t* bytes, int64_t n, uint32_t* crcs) {
  // Every target above the baseline has the instruction; the baseline uses the tables.
  const bool hardware = strcmp(tfpar_cpu_target(), "baseline") != 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t crc = Crc(static_cast<const unsigned char*>(data[i]), bytes[i], hardware);
    crcs[i] = (crc >> 15 | crc << 17) + 0xa282ead8u;
  }
}
