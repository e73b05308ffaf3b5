#include "launch.h"

namespace tfpar_cuda {
namespace {

struct SquaresParams {
  Parts parts;
  int64_t first_tile;
  int64_t limit;
  double* sums;  // two per tile; the second is not used
};

__global__ void __launch_bounds__(kTileThreads) SquaresKernel(const __grid_constant__ SquaresParams params) {
  const int64_t tile = params.first_tile + blockIdx.x;
  const Place place = FindPlace(tile, kLogTileElements, params.limit);
  Tile x;
  LoadParts(params.parts, place.span, place.quads, x);
  WriteSums(SumSquares(x, place.span, place.quads), 0.0, Shared().sums, params.sums + 2 * tile);
}

// One thread block adds up the sums of all tiles. There are few: one per 16 KB of gradient.
constexpr int kAddUpThreads = 1024;

template <typename Number>
struct AddUpParams {
  const double* from;  // [count][2]
  int64_t count;
  Number* to;
  int32_t columns;
};

template <typename Number>
__global__ void __launch_bounds__(kAddUpThreads) AddUpKernel(const __grid_constant__ AddUpParams<Number> params) {
  double first = 0.0, second = 0.0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < params.count; i += kAddUpThreads) {
    first += params.from[2 * i];
    second += params.from[2 * i + 1];
  }
  WriteSums(first, second, reinterpret_cast<double (*)[2]>(tfpar_shared_memory), params.to, params.columns);
}

template <typename Number>
cudaError_t AddUp(const double* from, int64_t count, int columns, Number* to, void* stream) {
  AddUpParams<Number> params = {from, count, to, columns};
  const Kernel<AddUpParams<Number>> kernel = {AddUpKernel<Number>, kAddUpThreads,
                                              kAddUpThreads / 32 * 2 * sizeof(double)};
  return Launch(kernel, 1, stream, params);
}

struct FinishSumParams {
  const double* sum;
  float* norm_squared;
  bool* finite;
};

__global__ void FinishSumKernel(const __grid_constant__ FinishSumParams params) {
  const double sum = *params.sum;
  *params.norm_squared = static_cast<float>(sum);
  *params.finite = isfinite(sum);
}

}  // namespace

cudaError_t AddUpSums(const double* from, int64_t count, int columns, double* to, void* stream) {
  return AddUp(from, count, columns, to, stream);
}

}  // namespace tfpar_cuda

extern "C" int tfpar_cuda_sum_squares(const tfpar_vector* x, int64_t begin, int64_t end, double* result, void* scratch,
                                      void* stream) {
  using tfpar_cuda::SquaresParams;
  if (begin < 0 || end < begin || end > x->offset[x->parts]) return cudaErrorInvalidValue;
  if (result == nullptr || scratch == nullptr) return cudaErrorInvalidValue;
  tfpar_cuda::PartsOfTiles<tfpar_vector> source(*x, begin, end - begin, tfpar_cuda::kTileElements);
  SquaresParams params = {};
  params.limit = source.limit();
  params.sums = static_cast<double*>(scratch);
  const int64_t tiles = std::max<int64_t>(1, tfpar_cuda::CeilDivide(end - begin, tfpar_cuda::kTileElements));
  const cudaError_t error = tfpar_cuda::LaunchOverParts(tfpar_cuda::Tiled(tfpar_cuda::SquaresKernel), source, tiles,
                                                        stream, params, params.parts);
  return error != cudaSuccess ? error : tfpar_cuda::AddUpSums(params.sums, tiles, 1, result, stream);
}

extern "C" int tfpar_cuda_finish_norms(const double* norms, int64_t count, float* out, void* stream) {
  if (count < 0 || (count > 0 && norms == nullptr) || out == nullptr) return cudaErrorInvalidValue;
  return tfpar_cuda::AddUp(norms, count, 2, out, stream);
}

extern "C" int tfpar_cuda_finish_sum(const double* sum, float* norm_squared, void* finite, void* stream) {
  if (sum == nullptr || norm_squared == nullptr || finite == nullptr) return cudaErrorInvalidValue;
  tfpar_cuda::FinishSumParams params = {sum, norm_squared, static_cast<bool*>(finite)};
  const tfpar_cuda::Kernel<tfpar_cuda::FinishSumParams> kernel = {tfpar_cuda::FinishSumKernel, 1, 0};
  return tfpar_cuda::Launch(kernel, 1, stream, params);
}
