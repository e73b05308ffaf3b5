// The kernels of topk: a thread block processes one codec block; each thread holds up to 16 of its elements in
// registers.
#ifndef TFPAR_OPS_CORE_CUDA_TOPK_CUH_
#define TFPAR_OPS_CORE_CUDA_TOPK_CUH_

#include <cuda_runtime.h>
#include <stdint.h>

#include "arithmetic.cuh"
#include "payload.cuh"
#include "tile_kernels.cuh"
#include "tile_layout.cuh"
#include "vector.cuh"

namespace tfpar_cuda {

constexpr int kTopkQuads = 4;
constexpr int kTopkMaxThreads = 1024;
constexpr int kTopkMaxWarps = kTopkMaxThreads / 32;

__host__ __device__ constexpr int TopkThreads(int block) { return block <= 512 ? 32 : block / 16; }

// A histogram of 2048 bins, with a gap after every 32, so that threads that each read a run of bins have no bank
// conflicts.
constexpr int kBins = 2048;
__host__ __device__ constexpr int BinAt(int bin) { return bin + (bin >> 5); }

struct TopkShared {
  double sums[kTopkMaxWarps][2];
  uint64_t scan[kTopkMaxWarps][2];
  uint32_t bins[BinAt(kBins)];
  uint32_t bin;    // the bin that holds the threshold, or kNoBin
  uint32_t count;  // number of elements in that bin
  uint32_t need;   // number of them to keep
};
constexpr uint32_t kNoBin = 0xFFFFFFFFu;

__device__ inline TopkShared& SharedOfTopk() { return *reinterpret_cast<TopkShared*>(tfpar_shared_memory); }

// The type of the format. It does not use the kernels of tile_kernels.cuh.
struct TopK {};

typedef float TopkTile[kTopkQuads][4];

struct TopkPlace {
  int64_t block;
  int size;  // elements of a block
  Quads quads;
  Span span;

  // Whether quad k lies in the block: in a small block, not every thread has all quads.
  __device__ bool Has(int k) const {
    return 4 * (k * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) < size;
  }
};

__device__ inline TopkPlace FindTopkPlace(int64_t block, int log_block, int64_t limit) {
  const int64_t first = block << log_block;
  const int64_t end = (block + 1) << log_block;
  TopkPlace place;
  place.block = block;
  place.size = 1 << log_block;
  place.quads = {first + 4 * static_cast<int64_t>(threadIdx.x), 4 * static_cast<int64_t>(blockDim.x)};
  place.span = {first, 4 * kTopkQuads * static_cast<int64_t>(blockDim.x), limit < end ? limit : end};
  return place;
}

// Replaces value[j] by the sum of the preceding threads' value[j], and sets total[j] to the sum over all threads. The
// thread block must synchronise between two calls.
template <int kNumbers>
__device__ inline void ExclusiveScan(uint64_t (&value)[kNumbers], uint64_t (&total)[kNumbers]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  uint64_t (*scan)[2] = SharedOfTopk().scan;
#pragma unroll
  for (int j = 0; j < kNumbers; ++j) {
    uint64_t sum = value[j];
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const uint64_t before = __shfl_up_sync(kAllLanes, sum, step);
      if (lane >= step) sum += before;
    }
    if (lane == 31) scan[warp][j] = sum;
    value[j] = sum - value[j];
    total[j] = 0;
  }
  __syncthreads();
  for (int other = 0; other < static_cast<int>(blockDim.x) / 32; ++other) {
#pragma unroll
    for (int j = 0; j < kNumbers; ++j) {
      const uint64_t sum = scan[other][j];
      if (other < warp) value[j] += sum;
      total[j] += sum;
    }
  }
}

// The elements to keep: those whose masked magnitude bits are above `prefix`, and the first `need` of those equal to
// it.
struct Threshold {
  uint32_t prefix;
  uint32_t mask;
  uint32_t need;
};

// Finds the bin that holds the need-th largest of the counted elements, and stores it in shared memory. Returns the
// number of counted elements.
__device__ inline uint32_t FindBin(int bins, uint32_t need) {
  TopkShared& shared = SharedOfTopk();
  const int thread = static_cast<int>(threadIdx.x);
  const int run = bins / static_cast<int>(blockDim.x);
  const int top = bins - 1 - thread * run;  // the thread's first bin: bins descend as threads ascend
  uint64_t above[1] = {0}, total[1];
  for (int j = 0; j < run; ++j) above[0] += shared.bins[BinAt(top - j)];
  const uint32_t own = static_cast<uint32_t>(above[0]);
  ExclusiveScan(above, total);
  uint32_t before = static_cast<uint32_t>(above[0]);
  if (before < need && need <= before + own) {
    int bin = top;
    while (before + shared.bins[BinAt(bin)] < need) before += shared.bins[BinAt(bin--)];
    shared.bin = static_cast<uint32_t>(bin);
    shared.count = shared.bins[BinAt(bin)];
    shared.need = need - before;
  }
  __syncthreads();
  return static_cast<uint32_t>(total[0]);
}

// Radix selection from the top: of 11 bits, then 10, then 10. Zeros are not counted: in sparse gradients they would all
// contend for one bin.
__device__ inline Threshold FindThreshold(const uint32_t (&magnitude)[kTopkQuads][4], uint32_t keep) {
  TopkShared& shared = SharedOfTopk();
  Threshold threshold = {0, 0, keep};
#pragma unroll 1
  for (int shift = 20; shift >= 0; shift -= 10) {
    const uint32_t bins = shift == 20 ? kBins : kBins / 2;
    for (int i = static_cast<int>(threadIdx.x); i < BinAt(kBins); i += static_cast<int>(blockDim.x)) shared.bins[i] = 0;
    if (threadIdx.x == 0) shared.bin = kNoBin;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTopkQuads; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t bits = magnitude[k][i];
        if (bits != 0 && (bits & threshold.mask) == threshold.prefix) {
          atomicAdd(&shared.bins[BinAt(static_cast<int>(bits >> shift & (bins - 1)))], 1u);
        }
      }
    }
    __syncthreads();
    const uint32_t counted = FindBin(static_cast<int>(bins), threshold.need);
    // Only the first round can find too few elements. Then all non-zero elements and some zeros are kept.
    if (shared.bin == kNoBin) return {0, 0x7FFFFFFFu, keep - counted};
    threshold.prefix |= shared.bin << shift;
    threshold.mask |= (bins - 1) << shift;
    threshold.need = shared.need;
    const bool all = shared.count == shared.need;  // all elements of the bin are kept, so the remaining bits do not matter
    __syncthreads();
    if (all) break;
  }
  return threshold;
}

__device__ inline uint32_t Row(uint64_t packed, int k) { return static_cast<uint32_t>(packed >> (16 * k)) & 0xFFFFu; }

// Writes the kept elements in order of position, and replaces v by the new residual.
__device__ inline void KeepLargest(TopkTile& v, const TopkPlace& place, uint32_t keep, uint8_t* codes) {
  uint32_t magnitude[kTopkQuads][4];
#pragma unroll
  for (int k = 0; k < kTopkQuads; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) magnitude[k][i] = MagnitudeBits(v[k][i]);
  }
  const Threshold threshold = FindThreshold(magnitude, keep);

  // For each thread, how many preceding elements are above the threshold, and how many equal it. Positions ascend by
  // row (quads of the same k), then by thread; each row has 16 bits, as it has at most 4096 elements.
  uint64_t before[2] = {0, 0}, total[2];
#pragma unroll
  for (int k = 0; k < kTopkQuads; ++k) {
    if (!place.Has(k)) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t masked = magnitude[k][i] & threshold.mask;
      before[0] += static_cast<uint64_t>(masked > threshold.prefix) << (16 * k);
      before[1] += static_cast<uint64_t>(masked == threshold.prefix) << (16 * k);
    }
  }
  ExclusiveScan(before, total);

  uint16_t* positions = reinterpret_cast<uint16_t*>(codes);
  uint16_t* values = positions + keep;
  uint32_t row_above = 0, row_equal = 0;
#pragma unroll
  for (int k = 0; k < kTopkQuads; ++k) {
    uint32_t above = row_above + Row(before[0], k), equal = row_equal + Row(before[1], k);
    row_above += Row(total[0], k);
    row_equal += Row(total[1], k);
    if (!place.Has(k)) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t masked = magnitude[k][i] & threshold.mask;
      const bool is_above = masked > threshold.prefix, is_equal = masked == threshold.prefix;
      if (is_above || (is_equal && equal < threshold.need)) {
        const uint32_t entry = above + min(equal, threshold.need);
        const uint32_t code = ToBf16(v[k][i]);
        positions[entry] = static_cast<uint16_t>(place.quads.first + k * place.quads.stride + i - place.span.first);
        values[entry] = static_cast<uint16_t>(code);
        v[k][i] = Flush(Subtract(v[k][i], FromBf16(code)));
      }
      above += is_above;
      equal += is_equal;
    }
  }
}

__device__ inline void WriteNanBlock(int keep, uint8_t* codes) {
  uint16_t* positions = reinterpret_cast<uint16_t*>(codes);
  for (int entry = static_cast<int>(threadIdx.x); entry < keep; entry += static_cast<int>(blockDim.x)) {
    positions[entry] = static_cast<uint16_t>(entry);
    positions[keep + entry] = static_cast<uint16_t>(kNanBits >> 16);
  }
}

// An encoder writes positions in rising order, so no two threads have the same one. If another payload repeats a
// position, the thread of its first entry adds up all its entries: that is slow, but no encoder writes such a block.
__device__ inline bool IsFirstOfItsPosition(const uint16_t* positions, int entry) {
  for (int i = 0; i < entry; ++i) {
    if (positions[i] == positions[entry]) return false;
  }
  return true;
}

__device__ inline float SumFrom(const uint16_t* positions, int entry, int keep) {
  float sum = 0.0f;
  for (int i = entry; i < keep; ++i) {
    if (positions[i] == positions[entry]) sum = Add(sum, FromBf16(positions[keep + i]));
  }
  return sum;
}

__device__ inline bool SeesForeignHeader(const Peers& peers, const Layout& layout) {
  bool foreign = false;
  for (int peer = static_cast<int>(threadIdx.x); peer < peers.count; peer += static_cast<int>(blockDim.x)) {
    foreign |= IsForeign(LoadHeader(peers, layout, peer), layout);
  }
  return foreign;
}

// Checks payloads without blocks, which can only have a wrong header.
__device__ inline void CheckHeaders(const Parts&, const Layout&) {}

__device__ inline void CheckHeaders(const Peers& peers, const Layout& layout) {
  if (SeesForeignHeader(peers, layout)) ReportInvalid(peers);
}

// Adds up the entries of all payloads in `sum`, one block in shared memory. Returns true if the block is NaN instead.
// The thread block is synchronised on return.
__device__ inline bool SumTopkPeers(const Peers& peers, const Layout& layout, int64_t block, float* sum) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int size = 1 << layout.log_block, keep = layout.keep;
  for (int i = thread; i < size; i += threads) sum[i] = 0.0f;

  bool invalid = SeesForeignHeader(peers, layout), nan = false, falling = false;
  for (int i = thread; i < peers.count * keep; i += threads) {
    const int entry = i % keep;
    const uint8_t* codes = BlockCodes(peers.payload[i / keep], layout, block);
    const uint16_t* positions = reinterpret_cast<const uint16_t*>(codes);
    invalid |= positions[entry] >= size;
    if (entry == 0) {
      nan |= !(fabsf(FromBf16(positions[keep])) <= Float(kInfinityBits));
    } else {
      falling |= positions[entry - 1] >= positions[entry];
    }
  }
  if (invalid) ReportInvalid(peers);
  if (__syncthreads_or(invalid || nan)) return true;

  const bool any_falling = __syncthreads_or(falling);
  for (int peer = 0; peer < peers.count; ++peer) {
    const uint16_t* positions = reinterpret_cast<const uint16_t*>(BlockCodes(peers.payload[peer], layout, block));
    for (int entry = thread; entry < keep; entry += threads) {
      float& to = sum[positions[entry]];
      if (!any_falling) {
        to = Add(to, FromBf16(positions[keep + entry]));
      } else if (IsFirstOfItsPosition(positions, entry)) {
        to = Add(to, SumFrom(positions, entry, keep));
      }
    }
    __syncthreads();
  }
  return false;
}

__device__ inline void LoadSum(const Peers& peers, const Layout& layout, const TopkPlace& place, TopkTile& v) {
  const float4* sum = reinterpret_cast<const float4*>(tfpar_shared_memory);
  const bool nan = SumTopkPeers(peers, layout, place.block, reinterpret_cast<float*>(tfpar_shared_memory));
  const float factor = nan ? Nan() : Factor(peers);
#pragma unroll
  for (int k = 0; k < kTopkQuads; ++k) {
    v[k][0] = v[k][1] = v[k][2] = v[k][3] = 0.0f;
    if (!place.Has(k)) continue;
    const float4 quad = sum[k * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)];
    v[k][0] = quad.x;
    v[k][1] = quad.y;
    v[k][2] = quad.z;
    v[k][3] = quad.w;
    if (factor == 1.0f) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[k][i] = Scaled(v[k][i], factor);
  }
}

__device__ inline void LoadTopkSource(const Parts& parts, const Layout&, const TopkPlace& place, TopkTile& v) {
  LoadParts(parts, place.span, place.quads, v);
}

__device__ inline void LoadTopkSource(const Peers& peers, const Layout& layout, const TopkPlace& place, TopkTile& v) {
  LoadSum(peers, layout, place, v);
#pragma unroll
  for (int k = 0; k < kTopkQuads; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (place.quads.first + k * place.quads.stride + i >= place.span.limit) v[k][i] = 0.0f;
    }
  }
}

template <typename Source>
__global__ void __launch_bounds__(kTopkMaxThreads)
    TopkEncodeKernel(const __grid_constant__ EncodeParams<Source> params) {
  const Layout& layout = params.layout;
  const TopkPlace place = FindTopkPlace(params.first_tile + blockIdx.x, layout.log_block, params.limit);
  if (place.block == 0) WriteFrame(params.payload, layout);
  const bool empty = place.block >= layout.blocks;  // the payload has no blocks

  TopkTile residual, v;
  LoadArray(params.residual, place.span, place.quads, residual);
  if (empty) {
    CheckHeaders(params.source, layout);
#pragma unroll
    for (int k = 0; k < kTopkQuads; ++k) v[k][0] = v[k][1] = v[k][2] = v[k][3] = 0.0f;
  } else {
    LoadTopkSource(params.source, layout, place, v);
  }
  const double sum = params.sums != nullptr ? SumSquares(v, place.span, place.quads) : 0.0;
  bool finite = true;
#pragma unroll
  for (int k = 0; k < kTopkQuads; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[k][i] = Flush(Add(v[k][i], residual[k][i]));
      finite &= IsFinite(v[k][i]);
    }
  }

  // The barrier also separates the reads of the sum in shared memory from the next use of that memory.
  const bool keep_none = __syncthreads_or(!finite);
  uint8_t* codes = BlockCodes(params.payload, layout, place.block);
  if (keep_none) {
    WriteNanBlock(layout.keep, codes);
    LoadArray(params.residual, place.span, place.quads, v);
  } else if (!empty) {
    KeepLargest(v, place, static_cast<uint32_t>(layout.keep), codes);
  }
  if (params.new_residual != nullptr) StoreArray(params.new_residual, place.span, place.quads, v);
  if (params.sums != nullptr) {
    WriteSums(sum, SumSquares(v, place.span, place.quads), SharedOfTopk().sums, params.sums + 2 * place.block);
  }
}

}  // namespace tfpar_cuda

#endif  // TFPAR_OPS_CORE_CUDA_TOPK_CUH_
