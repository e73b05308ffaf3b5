// What several tests of the kernels need: places to cut a vector at, and the comparison with the processor.
#ifndef TFPAR_TESTS_NATIVE_CUDA_SUPPORT_H_
#define TFPAR_TESTS_NATIVE_CUDA_SUPPORT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "device.h"

namespace support {

// Says in a failure which codec, length and element it is.
std::string At(const tfpar_codec& codec, int64_t n, int64_t index);

// `count` places in a vector of `size` elements, in rising order.
std::vector<int64_t> Cuts(cases::Random* random, int64_t size, int64_t count);

// Compares what a kernel encoded with what the processor did.
void CheckEncoded(const tfpar_codec& codec, int64_t n, const cases::Encoded& got, const cases::Encoded& expected);

}  // namespace support

#endif  // TFPAR_TESTS_NATIVE_CUDA_SUPPORT_H_
