// The host side of a launch: the layout, the parts that fit into one launch, and the choice of a kernel.
#ifndef TFPAR_OPS_CORE_CUDA_LAUNCH_H_
#define TFPAR_OPS_CORE_CUDA_LAUNCH_H_

#include <cuda_runtime.h>
#include <stdint.h>

#include <algorithm>
#include <type_traits>

#include "payload.cuh"
#include "tile_kernels.cuh"
#include "tile_layout.cuh"
#include "vector.cuh"

#define TFPAR_QUOTE(path) #path
#define TFPAR_FORMAT_FILE(name) TFPAR_QUOTE(cuda/name.cuh)
#include "../formats.h"

namespace tfpar_cuda {

// The number of elements that one thread block processes.
inline int64_t TileElements(const tfpar_codec& codec) { return codec.keep > 0 ? codec.block : kTileElements; }

inline int64_t CeilDivide(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// The number of tiles for n elements. At least one, because tile 0 writes or checks the header.
inline int64_t Tiles(const tfpar_codec& codec, int64_t n) {
  return std::max<int64_t>(1, CeilDivide(n, TileElements(codec)));
}

// The values of layout.h that kernels need, computed once for a payload of n elements.
inline Layout MakeLayout(const tfpar_codec& codec, int64_t n) {
  Layout layout = {};
  layout.header = tfpar::MakeHeader(codec, n);
  layout.blocks = tfpar::NumBlocks(codec, n);
  layout.scales_at = tfpar::ScalesAt(codec, n);
  layout.padding_at = tfpar::PaddingAt(codec, n);
  layout.bytes = tfpar_payload_bytes(&codec, n);
  layout.log_block = __builtin_ctz(static_cast<unsigned>(codec.block));
  layout.block_bytes = static_cast<int32_t>(tfpar::CodeBytes(codec));
  layout.scale_bytes = static_cast<int32_t>(tfpar::ScaleBytes(codec));
  layout.keep = codec.keep;
  layout.significand = 0x4B000000u;
  return layout;
}

inline bool IsMultiple(const void* pointer, uint64_t of) { return reinterpret_cast<uint64_t>(pointer) % of == 0; }

// Checks the codec and the range that a function receives.
inline cudaError_t CheckRange(const tfpar_codec* codec, int64_t begin, int64_t n) {
  if (codec == nullptr || tfpar_codec_check(codec, nullptr, 0) != 0) return cudaErrorInvalidValue;
  if (tfpar_payload_bytes(codec, n) < 0) return cudaErrorInvalidValue;
  return begin < 0 || begin % codec->block != 0 ? cudaErrorInvalidValue : cudaSuccess;
}

inline cudaError_t MakePeers(const void* const* payloads, int64_t peers, float factor, const float* device_factor,
                             int32_t* status, Peers* out) {
  if (peers < 0 || peers > TFPAR_CUDA_MAX_PEERS) return cudaErrorInvalidValue;
  *out = {};
  for (int64_t i = 0; i < peers; ++i) {
    if (payloads[i] == nullptr) return cudaErrorInvalidValue;
    if (!IsMultiple(payloads[i], 4)) return cudaErrorMisalignedAddress;
    out->payload[i] = static_cast<const uint8_t*>(payloads[i]);
  }
  out->count = static_cast<int32_t>(peers);
  out->factor = factor;
  out->device_factor = device_factor;
  out->status = status;
  return cudaSuccess;
}

// Iterates over elements [begin, begin + n) of a vector, each time over as many tiles as one launch has room for parts.
template <typename Vector>
class PartsOfTiles {
 public:
  PartsOfTiles(const Vector& vector, int64_t begin, int64_t n, int64_t tile_elements)
      : vector_(vector), begin_(begin), tile_elements_(tile_elements) {
    const int64_t size = vector.parts > 0 ? vector.offset[vector.parts] : 0;
    limit_ = std::max<int64_t>(0, std::min(n, size - begin));
    part_ = std::upper_bound(vector.offset, vector.offset + vector.parts, begin) - vector.offset;
    part_ = std::max<int64_t>(0, part_ - 1);
  }

  // The number of elements that exist.
  int64_t limit() const { return limit_; }

  // Fills in the parts for the tiles from `tile` on, which is the previous call's result. Returns the first tile that
  // the parts do not cover, `tiles` if they cover all, and `tile` itself if that tile alone has too many parts.
  int64_t Next(int64_t tile, int64_t tiles, Parts* parts) {
    const int64_t start = tile * tile_elements_;
    while (part_ < vector_.parts && vector_.offset[part_ + 1] - begin_ <= start) ++part_;
    *parts = {};
    for (int64_t i = part_; i < vector_.parts && vector_.offset[i] - begin_ < limit_; ++i) {
      if (vector_.offset[i] == vector_.offset[i + 1]) continue;
      const int64_t position = vector_.offset[i] - begin_;
      if (parts->count == TFPAR_CUDA_MAX_PARTS) return position / tile_elements_;
      parts->base[parts->count] = OriginOf(vector_.data[i], position);
      parts->offset[parts->count] = position;
      parts->offset[++parts->count] = vector_.offset[i + 1] - begin_;
    }
    return tiles;
  }

 private:
  // The address that position 0 would have. Computed with integers, as it lies outside of the part.
  static float* OriginOf(const float* part, int64_t position) {
    return reinterpret_cast<float*>(reinterpret_cast<uint64_t>(part) - sizeof(float) * static_cast<uint64_t>(position));
  }

  const Vector& vector_;
  int64_t begin_;
  int64_t tile_elements_;
  int64_t limit_;
  int64_t part_;
};

template <typename Params>
struct Kernel {
  void (*function)(Params);
  int threads;
  size_t shared_bytes;
};

template <typename Params>
cudaError_t Launch(const Kernel<Params>& kernel, int64_t thread_blocks, void* stream, Params& params) {
  if (thread_blocks > INT32_MAX) return cudaErrorInvalidValue;
  constexpr size_t kSharedWithoutAsking = 48 * 1024;
  if (kernel.shared_bytes > kSharedWithoutAsking) {
    const cudaError_t error = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(kernel.shared_bytes));
    if (error != cudaSuccess) return error;
  }
  void* arguments[] = {&params};
  return cudaLaunchKernel(kernel.function, dim3(static_cast<unsigned>(thread_blocks)),
                          dim3(static_cast<unsigned>(kernel.threads)), arguments, kernel.shared_bytes,
                          static_cast<cudaStream_t>(stream));
}

// Launches a kernel over all tiles of a vector, in as many launches as its parts need. `parts` is a member of `params`.
template <typename Params, typename Vector>
cudaError_t LaunchOverParts(const Kernel<Params>& kernel, PartsOfTiles<Vector>& source, int64_t tiles, void* stream,
                            Params& params, Parts& parts) {
  for (int64_t tile = 0; tile < tiles;) {
    const int64_t end = source.Next(tile, tiles, &parts);
    if (end == tile) return cudaErrorNotSupported;
    params.first_tile = tile;
    const cudaError_t error = Launch(kernel, end - tile, stream, params);
    if (error != cudaSuccess) return error;
    tile = end;
  }
  return cudaSuccess;
}

// ---- Choice ----

template <typename Params>
Kernel<Params> Tiled(void (*function)(Params)) {
  return {function, kTileThreads, sizeof(TileShared)};
}

template <class Format, tfpar::Rounding kRounding, typename Source>
Kernel<EncodeParams<Source>> EncodeKernelFor(const tfpar_codec& codec) {
  if constexpr (std::is_same<Format, TopK>::value) {
    const bool sums = std::is_same<Source, Peers>::value;  // shared memory then holds the sum of a whole block
    const size_t sum_bytes = sums ? sizeof(float) * static_cast<size_t>(codec.block) : 0;
    return {TopkEncodeKernel<Source>, TopkThreads(codec.block), std::max(sizeof(TopkShared), sum_bytes)};
  } else {
    if constexpr (kRounding == tfpar::Rounding::STOCHASTIC) {
      if (codec.stochastic != 0) return Tiled(EncodeKernel<Format, true, Source>);
    }
    return Tiled(EncodeKernel<Format, false, Source>);
  }
}

template <typename Source>
Kernel<EncodeParams<Source>> EncodeKernelOf(const tfpar_codec& codec) {
  switch (codec.kind) {
#define TFPAR_FORMAT_CASE(ID, name, number, code_bits, codes, scale, smallest_block, largest_block, rounding, Kernel) \
  case TFPAR_##ID:                                                                                                    \
    return EncodeKernelFor<Kernel, tfpar::Rounding::rounding, Source>(codec);
    TFPAR_FORMATS(TFPAR_FORMAT_CASE)
#undef TFPAR_FORMAT_CASE
    default:
      return {};  // CheckRange has refused it
  }
}

// ---- Encoding ----

// Checks the arguments that tfpar_cuda_encode and tfpar_cuda_recode have in common.
inline cudaError_t CheckTarget(const tfpar_codec* codec, int64_t begin, int64_t n, const void* payload,
                               const double* norms, const void* scratch) {
  const cudaError_t error = CheckRange(codec, begin, n);
  if (error != cudaSuccess) return error;
  if (payload == nullptr || (norms != nullptr && scratch == nullptr)) return cudaErrorInvalidValue;
  return IsMultiple(payload, 4) && IsMultiple(scratch, 8) ? cudaSuccess : cudaErrorMisalignedAddress;
}

template <typename Source>
EncodeParams<Source> MakeEncodeParams(const tfpar_codec& codec, int64_t begin, int64_t n, int64_t limit,
                                      const float* residual, float* new_residual, void* payload) {
  EncodeParams<Source> params = {};
  params.layout = MakeLayout(codec, n);
  params.limit = limit;
  params.residual = residual;
  params.new_residual = new_residual;
  params.payload = static_cast<uint8_t*>(payload);
  params.first_block = begin / codec.block;
  params.seed = codec.seed;
  params.step = codec.step;
  return params;
}

// norms.cu: to[j] = sum over i < count of from[i][j], j < columns; `from` has two columns.
cudaError_t AddUpSums(const double* from, int64_t count, int columns, double* to, void* stream);

}  // namespace tfpar_cuda

#endif  // TFPAR_OPS_CORE_CUDA_LAUNCH_H_
