// Checksums of TFRecord files: CRC-32C (Castagnoli; RFC 3720, appendix B.4), masked as TensorFlow stores it.
#ifndef TFPAR_OPS_CORE_CRC32C_H_
#define TFPAR_OPS_CORE_CRC32C_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

// Writes to crcs[i] the masked CRC-32C of the `bytes[i]` bytes at data[i], for each i below n.
void tfpar_masked_crc32c(const void* const* data, const int64_t* bytes, int64_t n, uint32_t* crcs);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif

#endif  // TFPAR_OPS_CORE_CRC32C_H_
