// Arguments that are refused.
#include <cstdint>
#include <string>
#include <vector>

#include "device.h"

// More parts in 4096 consecutive elements than one launch has room for.
TEST(TooManyPartsInOnePlace) {
  const tfpar_codec codec = cases::Defaults()[0];
  const float element = 1.0f;
  for (int64_t parts : {TFPAR_CUDA_MAX_PARTS, TFPAR_CUDA_MAX_PARTS + 1}) {
    const device::Array<float> x(static_cast<size_t>(parts), element);
    std::vector<const float*> data;
    std::vector<int64_t> offset = {0};
    for (int64_t i = 0; i < parts; ++i) {
      data.push_back(x.data() + i);
      offset.push_back(i + 1);
    }
    const tfpar_vector view = {data.data(), offset.data(), parts};
    const device::Array<uint8_t> payload(static_cast<size_t>(tfpar_payload_bytes(&codec, parts)), 0);
    const int error =
        tfpar_cuda_encode(&codec, &view, 0, parts, nullptr, nullptr, payload.data(), nullptr, nullptr, nullptr);
    CHECK(error == (parts > TFPAR_CUDA_MAX_PARTS ? cudaErrorNotSupported : cudaSuccess), std::to_string(error));
    device::Must(cudaDeviceSynchronize(), "tfpar_cuda_encode");
  }
}

TEST(Arguments) {
  tfpar_codec codec = cases::Defaults()[2];
  const device::Array<uint8_t> memory(4096, 0);
  void* payload = memory.data();
  const int64_t offset[] = {0};
  const tfpar_vector x = {nullptr, offset, 0};
  const auto encode = [&](int64_t begin, int64_t n, void* to, double* norms) {
    return tfpar_cuda_encode(&codec, &x, begin, n, nullptr, nullptr, to, norms, nullptr, nullptr);
  };
  CHECK(encode(0, -1, payload, nullptr) == cudaErrorInvalidValue, "length");
  CHECK(encode(1, 10, payload, nullptr) == cudaErrorInvalidValue, "not at a block");
  CHECK(encode(0, 10, nullptr, nullptr) == cudaErrorInvalidValue, "no payload");
  CHECK(encode(0, 10, memory.data() + 2, nullptr) == cudaErrorMisalignedAddress, "address");
  CHECK(encode(0, 10, payload, reinterpret_cast<double*>(payload)) == cudaErrorInvalidValue, "no scratch");
  codec.block = 100;
  CHECK(encode(0, 10, payload, nullptr) == cudaErrorInvalidValue, "block");
  CHECK(tfpar_cuda_scratch_bytes(nullptr, -1) == -1, "length");
  codec.block = 512;
  const std::vector<const void*> payloads(TFPAR_CUDA_MAX_PEERS + 1, payload);
  CHECK(tfpar_cuda_recode(&codec, 10, payloads.data(), TFPAR_CUDA_MAX_PEERS + 1, 1.0f, nullptr, 10, 0, nullptr, nullptr,
                          payload, nullptr, nullptr, nullptr, nullptr) == cudaErrorInvalidValue,
        "peers");
  CHECK(tfpar_cuda_recode(&codec, 10, payloads.data(), 1, 1.0f, nullptr, 11, 0, nullptr, nullptr, payload, nullptr,
                          nullptr, nullptr, nullptr) == cudaErrorInvalidValue,
        "valid");
}
