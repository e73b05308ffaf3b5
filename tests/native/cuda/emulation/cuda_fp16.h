// The conversions between float32 and half that the kernels use; cuda_runtime.h describes the emulation.
#ifndef TESTS_NATIVE_CUDA_EMULATION_CUDA_FP16_H_
#define TESTS_NATIVE_CUDA_EMULATION_CUDA_FP16_H_

#include <stdint.h>
#include <string.h>

struct __half {
  uint16_t bits;
};

inline uint16_t __half_as_ushort(__half half) { return half.bits; }
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }

inline __half __float2half_rn(float v) {
  const _Float16 rounded = static_cast<_Float16>(v);
  __half half;
  memcpy(&half, &rounded, sizeof(half));
  return half;
}

inline float __half2float(__half half) {
  _Float16 v;
  memcpy(&v, &half, sizeof(v));
  return static_cast<float>(v);
}

#endif  // TESTS_NATIVE_CUDA_EMULATION_CUDA_FP16_H_
