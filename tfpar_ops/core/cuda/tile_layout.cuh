// How a vector is distributed over thread blocks: in tiles of 4096 elements, with 128 threads that each hold 32
// elements in registers.
//
// A tile is one codec block of 4096 elements, two of 2048, and so on down to 64 of 64. The threads of a codec block
// form its group of block / 32 adjacent threads. Thread `lane` of the group holds the quad at 4 * lane in every eighth
// of the block. Such quads fill whole words of codes of any width (FORMAT.md, "Planes"), and all eight numbers of a
// Philox call belong to one thread.
#ifndef TFPAR_OPS_CORE_CUDA_TILE_LAYOUT_CUH_
#define TFPAR_OPS_CORE_CUDA_TILE_LAYOUT_CUH_

#include <cuda_runtime.h>
#include <stdint.h>

#include "arithmetic.cuh"
#include "vector.cuh"

// All shared memory is allocated at launch: see TileShared, and TopkShared in topk.cuh.
extern __shared__ __align__(16) unsigned char tfpar_shared_memory[];

namespace tfpar_cuda {

constexpr int kLogTileElements = 12;
constexpr int kTileElements = 1 << kLogTileElements;
constexpr int kTileThreads = 128;
constexpr int kTileQuads = 8;
constexpr int kWarps = kTileThreads / 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

typedef float Tile[kTileQuads][4];

struct TileShared {
  float halves[kTileThreads][4];
  double sums[kWarps][2];
  uint32_t largest[kWarps];
};

__device__ inline TileShared& Shared() { return *reinterpret_cast<TileShared*>(tfpar_shared_memory); }

// The place of a thread in the vector.
struct Place {
  int64_t block;  // its codec block, counted from the start of the encoded range
  int group;      // number of threads of that codec block
  int lane;       // index of this thread among them
  Quads quads;
  Span span;
};

__device__ inline Place FindPlace(int64_t tile, int log_block, int64_t limit) {
  const int thread = static_cast<int>(threadIdx.x);
  const int group = 1 << (log_block - 5);
  Place place;
  place.group = group;
  place.lane = thread & (group - 1);
  place.block = (tile << (kLogTileElements - log_block)) + (thread >> (log_block - 5));
  place.quads = {(place.block << log_block) + 4 * place.lane, static_cast<int64_t>(4) * group};
  place.span = {tile * kTileElements, kTileElements, limit};
  return place;
}

// ---- Reductions over a group ----

__device__ inline uint32_t GroupMax(uint32_t value, const Place& place) {
  for (int step = 1; step < place.group && step < 32; step <<= 1) {
    value = max(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  if (place.group > 32) {
    uint32_t* largest = Shared().largest;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x % 32 == 0) largest[warp] = value;
    __syncthreads();
    value = max(largest[warp], largest[warp ^ 1]);
    if (place.group > 64) value = max(value, max(largest[warp ^ 2], largest[warp ^ 3]));
  }
  return value;
}

__device__ inline void AddTo(float (&sum)[4], const float (&other)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = Add(sum[i], other[i]);
}

// Sum of the magnitudes of a block by halving, in the order of FORMAT.md: adds the quads of the second half to those of
// the first until one quad is left, then adds its four elements. Returns the sum in all threads of the group.
__device__ inline float GroupSumOfMagnitudes(const Tile& v, const Place& place) {
  float half[4][4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) half[k][i] = Add(fabsf(v[k][i]), fabsf(v[k + 4][i]));
  }
  AddTo(half[0], half[2]);
  AddTo(half[1], half[3]);
  AddTo(half[0], half[1]);
  float (&sum)[4] = half[0];

  int step = place.group / 2;
  if (place.group > 32) {  // the same for the whole thread block
    float (*halves)[4] = Shared().halves;
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < 4; ++i) halves[thread][i] = sum[i];
    __syncthreads();
    AddTo(sum, halves[thread ^ step]);
    if (place.group > 64) {
      float other[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) other[i] = Add(halves[thread ^ 32][i], halves[thread ^ 32 ^ step][i]);
      AddTo(sum, other);
    }
    step = 16;
  }
  for (; step > 0; step >>= 1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = Add(sum[i], __shfl_xor_sync(kAllLanes, sum[i], step));
  }
  return Add(Add(sum[0], sum[2]), Add(sum[1], sum[3]));
}

// ---- Norms ----

// Sum of the squares of the elements that exist, in float64, where no square of a float32 overflows.
template <int kQuads>
__device__ inline double SumSquares(const float (&v)[kQuads][4], const Span& span, const Quads& quads) {
  double sum = 0.0;
  const bool whole = span.IsWhole();
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const double value = v[k][i];
      if (whole || quads.first + k * quads.stride + i < span.limit) sum = __fma_rn(value, value, sum);
    }
  }
  return sum;
}

__device__ inline double WarpSum(double sum) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return sum;
}

// Writes the sums over all threads of a thread block of up to 32 warps to to[0] and, with two columns, to[1]. The order
// of the additions is fixed. `shared` must have room for two numbers per warp.
template <typename Number>
__device__ inline void WriteSums(double first, double second, double (*shared)[2], Number* to, int columns = 2) {
  const int thread = static_cast<int>(threadIdx.x);
  first = WarpSum(first);
  second = WarpSum(second);
  if (thread % 32 == 0) {
    shared[thread / 32][0] = first;
    shared[thread / 32][1] = second;
  }
  __syncthreads();
  if (thread < columns) {
    double sum = 0.0;
    for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) sum += shared[warp][thread];
    to[thread] = static_cast<Number>(sum);
  }
}

}  // namespace tfpar_cuda

#endif  // TFPAR_OPS_CORE_CUDA_TILE_LAYOUT_CUH_
