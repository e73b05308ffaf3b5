// The kernels of all formats except topk: templates over the type of a format (codes.cuh). encode.cu, decode.cu and
// recode.cu instantiate them.
#ifndef TFPAR_OPS_CORE_CUDA_TILE_KERNELS_CUH_
#define TFPAR_OPS_CORE_CUDA_TILE_KERNELS_CUH_

#include <cuda_runtime.h>
#include <stdint.h>

#include "codes.cuh"
#include "payload.cuh"
#include "tile_layout.cuh"
#include "vector.cuh"

namespace tfpar_cuda {

// `Source` is the type of the input: Parts of a vector, or Peers, whose sum is encoded.
template <typename Source>
struct EncodeParams {
  Source source;
  Layout layout;
  int64_t first_tile;  // of this launch
  int64_t limit;       // elements that exist
  const float* residual;
  float* new_residual;
  uint8_t* payload;
  double* sums;         // two per tile, or null
  int64_t first_block;  // of the range, in the whole vector
  uint64_t seed;
  uint64_t step;
};

// Adds up this thread's elements of all payloads. Loads several payloads before it uses the first, to keep more loads
// in flight. kQuickly: by the format's AddQuickly, where it has one.
template <class Format, bool kQuickly>
__device__ inline void SumPeers(const Peers& peers, const Layout& layout, const Place& place, Tile& sum) {
  constexpr int kWords = Format::kBits;
  constexpr bool kOneByte = Format::kScale == ScaleType::BYTE;
  constexpr int kAtOnce = kWords >= 16 ? 1 : kWords >= 8 ? 2 : 4;
  // -0 + d = d: the sum of one payload is that payload, signs of zeros included. Only a denormal would be lost; no
  // encoder writes one, but bf16 codes can express it.
  constexpr bool kQuick = kQuickly && kHasQuickSum<Format>;
  float start = -0.0f;
  if constexpr (kQuick) start = Format::kStart;
  const int count = place.block < layout.blocks ? peers.count : 0;
  if (count == 0) start = 0.0f;
#pragma unroll
  for (int k = 0; k < kTileQuads; ++k) sum[k][0] = sum[k][1] = sum[k][2] = sum[k][3] = start;

  // Ends after one round if there is no payload. A loop that is entered in any case initialises the sum only once.
  int first = 0;
  do {
    uint32_t words[kAtOnce][kWords];
    uint32_t scale[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + j >= count) break;
      const uint8_t* payload = peers.payload[first + j];
      scale[j] = Format::kScale == ScaleType::NONE ? 0 : LoadScale<kOneByte>(payload, layout, place.block);
      LoadWords(BlockCodes(payload, layout, place.block), place, words[j]);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + j >= count) break;
      const uint32_t bits = ScaleBits<kOneByte>(scale[j], layout);
      if constexpr (kQuick) {
        if (Format::IsQuick(words[j], bits)) {
          Format::AddQuickly(words[j], bits, layout, sum);
          continue;
        }
      }
#pragma unroll
      for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float d = Format::Decode(GetCode(words[j], k, i), bits);
          sum[k][i] = Format::kDenormals && first + j == 0 ? d : Add(sum[k][i], d);
        }
      }
    }
    first += kAtOnce;
  } while (first < count);
}

// The scaled sum; NaN if the header of a payload does not match. All threads of the thread block call this.
template <class Format, bool kQuickly = true>
__device__ inline void DecodeSum(const Peers& peers, const Layout& layout, const Place& place, int64_t tile,
                                 Tile& sum) {
  static_assert(kTileThreads >= TFPAR_CUDA_MAX_PEERS, "thread i looks at header i");
  // The load starts here; its result is needed after the sum.
  const tfpar::Header header = LoadHeader(peers, layout, static_cast<int>(threadIdx.x));
  const float wanted_factor = Factor(peers);
  SumPeers<Format, kQuickly>(peers, layout, place, sum);
  const bool foreign = __syncthreads_or(IsForeign(header, layout));
  if (foreign && tile == 0) ReportInvalid(peers);
  const float factor = foreign ? Nan() : wanted_factor;
  if (factor == 1.0f) return;
#pragma unroll
  for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[k][i] = Scaled(sum[k][i], factor);
  }
}

// The values to encode, without the residual; zeros for elements that do not exist.
template <class Format>
__device__ inline void LoadSource(const Parts& parts, const Layout&, const Place& place, int64_t, Tile& x) {
  LoadParts(parts, place.span, place.quads, x);
}

template <class Format>
__device__ inline void LoadSource(const Peers& peers, const Layout& layout, const Place& place, int64_t tile, Tile& x) {
  // Here the residual is in registers too. On an H200, the quick sum of codes narrower than a byte then was the slower
  // one: by 9 % for int4 with stochastic rounding, 4 % for sign (docs/benchmarks/codecs.md).
  DecodeSum<Format, Format::kBits == 8>(peers, layout, place, tile, x);
  if (place.span.IsWhole()) return;
#pragma unroll
  for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (place.quads.first + k * place.quads.stride + i >= place.span.limit) x[k][i] = 0.0f;
    }
  }
}

template <class Format, bool kStochastic, typename Source>
__global__ void __launch_bounds__(kTileThreads, 4) EncodeKernel(const __grid_constant__ EncodeParams<Source> params) {
  const int64_t tile = params.first_tile + blockIdx.x;
  const Layout& layout = params.layout;
  if (tile == 0) WriteFrame(params.payload, layout);
  const Place place = FindPlace(tile, layout.log_block, params.limit);

  // The residual is loaded first: its loads then overlap the search for the parts of the vector.
  Tile residual, v;
  LoadArray(params.residual, place.span, place.quads, residual);
  LoadSource<Format>(params.source, layout, place, tile, v);
  const double sum = params.sums != nullptr ? SumSquares(v, place.span, place.quads) : 0.0;
#pragma unroll
  for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[k][i] = Flush(Add(v[k][i], residual[k][i]));
  }

  uint32_t words[Format::kBits] = {};
  const uint32_t scale = Format::template Encode<kStochastic>(params, place, v, words);
  if (place.block < layout.blocks) {
    StoreWords(BlockCodes(params.payload, layout, place.block), place, words);
    if (Format::kScale != ScaleType::NONE && place.lane == 0) WriteScale(params.payload, layout, place.block, scale);
    if (params.new_residual != nullptr) StoreArray(params.new_residual, place.span, place.quads, v);
  }
  if (params.sums != nullptr) {
    WriteSums(sum, SumSquares(v, place.span, place.quads), Shared().sums, params.sums + 2 * tile);
  }
}

}  // namespace tfpar_cuda

#endif  // TFPAR_OPS_CORE_CUDA_TILE_KERNELS_CUH_
