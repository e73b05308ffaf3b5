// FORMAT.md once more, element by element and with nothing in mind but to be plainly right: what the tests compare the
// kernels with. It shares no code with them, and works whatever the floating-point mode of the processor flushes.
#ifndef TFPAR_TESTS_NATIVE_ORACLE_H_
#define TFPAR_TESTS_NATIVE_ORACLE_H_

#include <cstdint>
#include <vector>

#include "../../tfpar_ops/core/codec.h"

namespace oracle {

using Floats = std::vector<float>;
using Bytes = std::vector<uint8_t>;

struct Encoded {
  Bytes payload;
  Floats residual;             // as long as the elements that exist
  std::vector<double> norms;   // two for each block, summed in no particular order
};

uint32_t Bits(float v);
float FromBits(uint32_t bits);

// flush(v) of FORMAT.md.
float Flush(float v);

// Four words of Philox4x32-10.
std::vector<uint32_t> Philox(const std::vector<uint32_t>& counter, const std::vector<uint32_t>& key);

// Payload of n elements, of which x and residual (empty for none) hold the first ones; `begin` is the position of the
// first in the whole vector.
Encoded Encode(const tfpar_codec& codec, const Floats& x, const Floats& residual, int64_t begin, int64_t n);

// What one payload stands for, padding included. `invalid` is set if a position lies outside its block.
Floats Decode(const tfpar_codec& codec, int64_t n, const Bytes& payload, bool* invalid);

// scaled(sum) of the first n elements.
Floats DecodeSum(const tfpar_codec& codec, int64_t n, const std::vector<Bytes>& payloads, float factor, bool* invalid);

}  // namespace oracle

#endif  // TFPAR_TESTS_NATIVE_ORACLE_H_
