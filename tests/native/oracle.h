// An implementation of FORMAT.md that works element by element and aims only to be obviously correct. The tests compare
// the kernels with it. It shares no code with them, and does not depend on the processor's mode for denormals.
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
  Floats residual;             // one element per element that exists
  std::vector<double> norms;   // two per block, summed in an unspecified order
};

// The payload of n elements. x and residual (empty for none) hold the first ones; the others are padding. `begin` is
// the position of the first element in the whole vector.
Encoded Encode(const tfpar_codec& codec, const Floats& x, const Floats& residual, int64_t begin, int64_t n);

// The elements of one payload, padding included. Sets `invalid` if a position lies outside its block.
Floats Decode(const tfpar_codec& codec, int64_t n, const Bytes& payload, bool* invalid);

// scaled(sum) of the first n elements.
Floats DecodeSum(const tfpar_codec& codec, int64_t n, const std::vector<Bytes>& payloads, float factor, bool* invalid);

}  // namespace oracle

#endif  // TFPAR_TESTS_NATIVE_ORACLE_H_
