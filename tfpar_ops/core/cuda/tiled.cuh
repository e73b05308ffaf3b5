// The kernels of all formats but topk: encode.cu, decode.cu and recode.cu compile them.
#ifndef TFPAR_OPS_CORE_CUDA_TILED_CUH_
#define TFPAR_OPS_CORE_CUDA_TILED_CUH_

#include <cuda_runtime.h>
#include <stdint.h>

#include "codes.cuh"
#include "payload.cuh"
#include "tile.cuh"
#include "vector.cuh"

namespace tfpar_cuda {

// `Source` is what is encoded: Parts of a vector, or Peers whose sum it is.
template <typename Source>
struct EncodeParams {
  Source source;
  Layout layout;
  int64_t first_tile;  // of this launch
  int64_t limit;       // elements that exist
  const float* residual;
  float* new_residual;
  uint8_t* payload;
  double* sums;         // two for each tile, or null
  int64_t first_block;  // of the range, in the whole vector
  uint64_t seed;
  uint64_t step;
};

// Adds up this thread's elements of all payloads. Several are loaded before the first is used, to have more loads in
// flight.
template <int kFormat>
__device__ inline void SumPeers(const Peers& peers, const Layout& layout, const Place& place, Tile& sum) {
  constexpr int kWords = CodeWords(kFormat);
  constexpr int kAtOnce = kWords >= 16 ? 1 : kWords >= 8 ? 2 : 4;
  // -0 + d = d: the sum of one payload is that payload, signs of zeros included. Only a denormal, which no encoder writes
  // but bf16 codes may hold, would be lost.
  const float start = peers.count > 0 ? -0.0f : 0.0f;
#pragma unroll
  for (int k = 0; k < kTileQuads; ++k) sum[k][0] = sum[k][1] = sum[k][2] = sum[k][3] = start;
  if (place.block >= layout.blocks) return;

  for (int first = 0; first < peers.count; first += kAtOnce) {
    uint32_t words[kAtOnce][kWords];
    uint32_t scale[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + j >= peers.count) break;
      const uint8_t* payload = peers.payload[first + j];
      scale[j] = IsCast(kFormat) ? 0 : LoadScale<kFormat == kFp8>(payload, layout, place.block);
      LoadWords<kFormat>(BlockCodes(payload, layout, place.block), place, words[j]);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + j >= peers.count) break;
      const uint32_t bits = ScaleBits<kFormat == kFp8>(scale[j], layout);
#pragma unroll
      for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float d = Decode<kFormat>(words[j], bits, k, i);
          sum[k][i] = kFormat == kBf16 && first + j == 0 ? d : Add(sum[k][i], d);
        }
      }
    }
  }
}

// The scaled sum; NaN if a payload is foreign. All threads of the thread block.
template <int kFormat>
__device__ inline void DecodeSum(const Peers& peers, const Layout& layout, const Place& place, int64_t tile,
                                 Tile& sum) {
  static_assert(kTileThreads >= TFPAR_CUDA_MAX_PEERS, "thread i looks at header i");
  // Asked for here, waited for after the sum.
  const tfpar::Header header = LoadHeader(peers, layout, static_cast<int>(threadIdx.x));
  const float wanted_factor = Factor(peers);
  SumPeers<kFormat>(peers, layout, place, sum);
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

// What is to be encoded, without the residual; zeros where it does not exist.
template <int kFormat>
__device__ inline void LoadSource(const Parts& parts, const Layout&, const Place& place, int64_t, Tile& x) {
  LoadParts(parts, place.span, place.quads, x);
}

template <int kFormat>
__device__ inline void LoadSource(const Peers& peers, const Layout& layout, const Place& place, int64_t tile, Tile& x) {
  DecodeSum<kFormat>(peers, layout, place, tile, x);
  if (place.span.IsWhole()) return;
#pragma unroll
  for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (place.quads.first + k * place.quads.stride + i >= place.span.limit) x[k][i] = 0.0f;
    }
  }
}

// Elements of the codec block that exist, as a float32.
__device__ inline float Existing(const Place& place, int log_block) {
  const int64_t left = place.span.limit - (place.block << log_block);
  const int64_t size = static_cast<int64_t>(1) << log_block;
  return static_cast<float>(static_cast<int>(left < 0 ? 0 : left < size ? left : size));
}

// Encodes v, which becomes the new residual, and returns the scale to be written. Residuals of what is not finite are
// put back from memory: that is rare, and saves holding them.
template <int kFormat, bool kStochastic, typename Source>
__device__ inline uint32_t EncodeTile(const EncodeParams<Source>& params, const Place& place, Tile& v,
                                      uint32_t (&words)[CodeWords(kFormat)]) {
  const Layout& layout = params.layout;
  if constexpr (IsCast(kFormat)) {
    if (EncodeCast<kFormat>(v, words)) {
      Tile residual;
      LoadArray(params.residual, place.span, place.quads, residual);
#pragma unroll
      for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[k][i] = IsFinite(v[k][i]) ? v[k][i] : residual[k][i];
      }
    }
    return 0;
  } else if constexpr (kFormat == kSign) {
    const float total = GroupSumOfMagnitudes(v, place);
    const float existing = Existing(place, layout.log_block);
    const bool finite = IsFinite(total);
    const float mean = existing == 0.0f ? 0.0f : Multiply(total, __frcp_rn(existing));
    const float scale = finite ? RoundScale(mean, layout.scale_bytes) : Nan();
    EncodeSigns(v, scale, words);
    if (!finite) LoadArray(params.residual, place.span, place.quads, v);
    return Bits(scale);
  } else {
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) largest = max(largest, MagnitudeBits(v[k][i]));
    }
    largest = GroupMax(largest, place);
    if (largest > (kFormat == kFp8 ? kLargestE4m3Bits : kInfinityBits - 1)) {
#pragma unroll
      for (int k = 0; k < CodeWords(kFormat); ++k) words[k] = ZeroWord<kFormat>();
      LoadArray(params.residual, place.span, place.quads, v);
      return kFormat == kFp8 ? 255u : kNanBits;
    }
    if constexpr (kFormat == kFp8) {
      const uint32_t scale = largest == 0 ? 0u : E4m3ScaleByte(largest);
      EncodeFp8(v, scale, words);
      return scale;
    } else {
      constexpr float kPart = kFormat == kInt8 ? 1.0f / 127.0f : kFormat == kInt4 ? 1.0f / 7.0f : 1.0f;
      const float scale = RoundScale(Multiply(Float(largest), kPart), layout.scale_bytes);
      if constexpr (kStochastic) {
        const int log_lanes = layout.log_block - 3;
        const uint64_t lane = (static_cast<uint64_t>(params.first_block + place.block) << log_lanes) + 4 * place.lane;
        EncodeStochastic<kFormat>(v, scale, lane, params.step, params.seed, words);
      } else {
        EncodeIntegers<kFormat>(v, scale, words);
      }
      return Bits(scale);
    }
  }
}

template <int kFormat, bool kStochastic, typename Source>
__global__ void __launch_bounds__(kTileThreads, 4) EncodeKernel(const __grid_constant__ EncodeParams<Source> params) {
  const int64_t tile = params.first_tile + blockIdx.x;
  const Layout& layout = params.layout;
  if (tile == 0) WriteFrame(params.payload, layout);
  const Place place = FindPlace(tile, layout.log_block, params.limit);

  // The residual first: its loads then fly while the parts of the vector are looked up.
  Tile residual, v;
  LoadArray(params.residual, place.span, place.quads, residual);
  LoadSource<kFormat>(params.source, layout, place, tile, v);
  const double sum = params.sums != nullptr ? SumSquares(v, place.span, place.quads) : 0.0;
#pragma unroll
  for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[k][i] = Flush(Add(v[k][i], residual[k][i]));
  }

  uint32_t words[CodeWords(kFormat)] = {};
  const uint32_t scale = EncodeTile<kFormat, kStochastic>(params, place, v, words);
  if (place.block < layout.blocks) {
    StoreWords<kFormat>(BlockCodes(params.payload, layout, place.block), place, words);
    if (!IsCast(kFormat) && place.lane == 0) WriteScale(params.payload, layout, place.block, scale);
    if (params.new_residual != nullptr) StoreArray(params.new_residual, place.span, place.quads, v);
  }
  if (params.sums != nullptr) {
    WriteSums(sum, SumSquares(v, place.span, place.quads), Shared().sums, params.sums + 2 * tile);
  }
}

}  // namespace tfpar_cuda

#endif  // TFPAR_OPS_CORE_CUDA_TILED_CUH_
