#include "launch.h"

extern "C" int64_t tfpar_cuda_scratch_bytes(const tfpar_codec* codec, int64_t n) {
  if (n < 0) return -1;
  const int64_t tile = codec == nullptr ? tfpar_cuda::kTileElements : tfpar_cuda::TileElements(*codec);
  return std::max<int64_t>(1, tfpar_cuda::CeilDivide(n, tile)) * 2 * int64_t{sizeof(double)};
}

extern "C" int tfpar_cuda_encode(const tfpar_codec* codec, const tfpar_vector* x, int64_t begin, int64_t n,
                                 const float* residual, float* new_residual, void* payload, double* norms,
                                 void* scratch, void* stream) {
  using tfpar_cuda::Parts;
  cudaError_t error = tfpar_cuda::CheckTarget(codec, begin, n, payload, norms, scratch);
  if (error != cudaSuccess) return error;
  tfpar_cuda::PartsOfTiles<tfpar_vector> source(*x, begin, n, tfpar_cuda::TileElements(*codec));
  tfpar_cuda::EncodeParams<Parts> params =
      tfpar_cuda::MakeEncodeParams<Parts>(*codec, begin, n, source.limit(), residual, new_residual, payload);
  params.sums = norms != nullptr ? static_cast<double*>(scratch) : nullptr;

  const int64_t tiles = tfpar_cuda::Tiles(*codec, n);
  error = tfpar_cuda::LaunchOverParts(tfpar_cuda::EncodeKernelOf<Parts>(*codec), source, tiles, stream, params,
                                      params.source);
  if (error != cudaSuccess || norms == nullptr) return error;
  return tfpar_cuda::AddUpSums(params.sums, tiles, 2, norms, stream);
}
