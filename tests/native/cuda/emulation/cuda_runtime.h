// The part of the CUDA runtime that the kernels of tfpar_ops/core/cuda use. With it, a C++ compiler builds the kernels
// for the processor, so that their logic is tested on machines without a GPU. The order of include paths makes the
// compiler find this header instead of the real one.
//
// The threads of a thread block run as fibers, one after the other. Each runs until it waits: for its warp in a
// shuffle, for the whole block at a barrier. If a thread waits for others that never arrive, the program ends. Device
// memory ends at an inaccessible page. Kernels are compiled with -fsanitize=undefined, which detects vector loads from
// addresses that are not aligned as a GPU requires.
#ifndef TESTS_NATIVE_CUDA_EMULATION_CUDA_RUNTIME_H_
#define TESTS_NATIVE_CUDA_EMULATION_CUDA_RUNTIME_H_

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <functional>

#define __global__
#define __device__
#define __host__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct dim3 {
  explicit dim3(unsigned x_in = 1) : x(x_in) {}
  unsigned x;
};
struct __align__(8) uint2 {
  unsigned x, y;
};
struct __align__(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- Host side ----

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorMisalignedAddress = 716,
  cudaErrorNotSupported = 801
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
typedef struct EmulatedStream* cudaStream_t;

cudaError_t cudaMalloc(void** pointer, size_t bytes);
cudaError_t cudaFree(void* pointer);
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaDeviceSynchronize();
const char* cudaGetErrorString(cudaError_t error);

namespace emulation {

void Run(unsigned thread_blocks, unsigned threads, size_t shared_bytes, const std::function<void()>& kernel);
// Shared memory beyond 48 KB must be requested with this function.
void AllowShared(size_t bytes);

// The indices of the running thread, and the size of its block.
extern dim3 thread_index, block_index, block_size;

// Waits until all threads of the warp have arrived, then replaces `value` by that of the thread in `lane`.
void Exchange(void* value, size_t bytes, int lane);
// Waits until all threads of the thread block have arrived. Returns whether `flag` was true in any of them.
bool Barrier(bool flag);

}  // namespace emulation

template <typename Params>
cudaError_t cudaFuncSetAttribute(void (*)(Params), cudaFuncAttribute, int bytes) {
  emulation::AllowShared(static_cast<size_t>(bytes));
  return cudaSuccess;
}

template <typename Params>
cudaError_t cudaLaunchKernel(void (*kernel)(Params), dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                             cudaStream_t) {
  // A GPU accepts 4 KB of parameters and 1 to 1024 threads per block.
  static_assert(sizeof(Params) <= 4096, "too many kernel parameters");
  if (grid.x == 0 || block.x == 0 || block.x > 1024) return cudaErrorInvalidValue;
  const Params& params = *static_cast<const Params*>(arguments[0]);
  emulation::Run(grid.x, block.x, shared_bytes, [&] { kernel(params); });
  return cudaSuccess;
}

// ---- Device side ----

#define threadIdx emulation::thread_index
#define blockIdx emulation::block_index
#define blockDim emulation::block_size

inline void __syncthreads() { emulation::Barrier(false); }
inline int __syncthreads_or(int flag) { return emulation::Barrier(flag != 0); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int step) {
  emulation::Exchange(&value, sizeof(value), static_cast<int>(threadIdx.x) % 32 ^ step);
  return value;
}

template <typename T>
T __shfl_up_sync(unsigned, T value, int step) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  emulation::Exchange(&value, sizeof(value), lane >= step ? lane - step : lane);
  return value;
}

inline uint32_t atomicAdd(uint32_t* to, uint32_t value) {
  *to += value;
  return *to - value;
}

inline void __stcs(float4* to, float4 value) { *to = value; }
inline void __stwb(uint2* to, uint2 value) { *to = value; }

template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}

inline uint32_t __float_as_uint(float v) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof(bits));
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float v;
  memcpy(&v, &bits, sizeof(v));
  return v;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float v) { return 1.0f / v; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline int __float2int_rn(float v) { return static_cast<int>(lrintf(v)); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }

#endif  // TESTS_NATIVE_CUDA_EMULATION_CUDA_RUNTIME_H_
