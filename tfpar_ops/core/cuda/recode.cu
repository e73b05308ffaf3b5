#include "launch.h"

extern "C" int tfpar_cuda_recode(const tfpar_codec* codec, int64_t n, const void* const* payloads, int64_t peers,
                                 float factor, const float* device_factor, int64_t valid, int64_t begin,
                                 const float* residual, float* new_residual, void* payload, double* norms,
                                 void* scratch, int32_t* status, void* stream) {
  using tfpar_cuda::Peers;
  cudaError_t error = tfpar_cuda::CheckTarget(codec, begin, n, payload, norms, scratch);
  if (error != cudaSuccess) return error;
  if (valid < 0 || valid > n) return cudaErrorInvalidValue;
  tfpar_cuda::EncodeParams<Peers> params =
      tfpar_cuda::MakeEncodeParams<Peers>(*codec, begin, n, valid, residual, new_residual, payload);
  error = tfpar_cuda::MakePeers(payloads, peers, factor, device_factor, status, &params.source);
  if (error != cudaSuccess) return error;
  params.sums = norms != nullptr ? static_cast<double*>(scratch) : nullptr;

  const int64_t tiles = tfpar_cuda::Tiles(*codec, n);
  error = tfpar_cuda::Launch(tfpar_cuda::EncodeKernelOf<Peers>(*codec), tiles, stream, params);
  if (error != cudaSuccess || norms == nullptr) return error;
  return tfpar_cuda::AddUpSums(params.sums, tiles, 2, norms, stream);
}
