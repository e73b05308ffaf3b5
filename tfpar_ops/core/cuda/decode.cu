#include "launch.h"

namespace tfpar_cuda {
namespace {

struct DecodeParams {
  Peers peers;
  Parts out;
  Layout layout;
  int64_t first_tile;
  int64_t limit;
};

template <class Format>
__global__ void __launch_bounds__(kTileThreads) DecodeKernel(const __grid_constant__ DecodeParams params) {
  const int64_t tile = params.first_tile + blockIdx.x;
  const Place place = FindPlace(tile, params.layout.log_block, params.limit);
  Tile sum;
  DecodeSum<Format>(params.peers, params.layout, place, tile, sum);
  StoreParts(params.out, place.span, place.quads, sum);
}

__global__ void __launch_bounds__(kTopkMaxThreads) TopkDecodeKernel(const __grid_constant__ DecodeParams params) {
  const TopkPlace place = FindTopkPlace(params.first_tile + blockIdx.x, params.layout.log_block, params.limit);
  if (place.block >= params.layout.blocks) {
    CheckHeaders(params.peers, params.layout);
    return;
  }
  TopkTile v;
  LoadSum(params.peers, params.layout, place, v);
  StoreParts(params.out, place.span, place.quads, v);
}

template <class Format>
Kernel<DecodeParams> DecodeKernelFor(const tfpar_codec& codec) {
  if constexpr (std::is_same<Format, TopK>::value) {
    return {TopkDecodeKernel, TopkThreads(codec.block), sizeof(float) * static_cast<size_t>(codec.block)};
  } else {
    return Tiled(DecodeKernel<Format>);
  }
}

Kernel<DecodeParams> DecodeKernelOf(const tfpar_codec& codec) {
  switch (codec.kind) {
#define TFPAR_FORMAT_CASE(ID, name, number, code_bits, codes, scale, smallest_block, largest_block, rounding, Kernel) \
  case TFPAR_##ID:                                                                                                    \
    return DecodeKernelFor<Kernel>(codec);
    TFPAR_FORMATS(TFPAR_FORMAT_CASE)
#undef TFPAR_FORMAT_CASE
    default:
      return {};  // unreachable: CheckRange rejects such a codec
  }
}

}  // namespace
}  // namespace tfpar_cuda

extern "C" int tfpar_cuda_decode_sum(const tfpar_codec* codec, int64_t n, const void* const* payloads, int64_t peers,
                                     float factor, const float* device_factor, const tfpar_mutable_vector* out,
                                     int64_t begin, int32_t* status, void* stream) {
  cudaError_t error = tfpar_cuda::CheckRange(codec, begin, n);
  if (error != cudaSuccess) return error;
  tfpar_cuda::PartsOfTiles<tfpar_mutable_vector> target(*out, begin, n, tfpar_cuda::TileElements(*codec));
  tfpar_cuda::DecodeParams params = {};
  error = tfpar_cuda::MakePeers(payloads, peers, factor, device_factor, status, &params.peers);
  if (error != cudaSuccess) return error;
  params.layout = tfpar_cuda::MakeLayout(*codec, n);
  params.limit = target.limit();
  return tfpar_cuda::LaunchOverParts(tfpar_cuda::DecodeKernelOf(*codec), target,
                                     tfpar_cuda::Tiles(*codec, params.limit), stream, params, params.out);
}
