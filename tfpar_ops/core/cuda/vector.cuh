// Vectors of several parts in a kernel's parameters, and functions to load and store groups of four elements ("quads").
//
// Positions count from the start of the encoded range. A thread's quads are `stride` elements apart.
#ifndef TFPAR_OPS_CORE_CUDA_VECTOR_CUH_
#define TFPAR_OPS_CORE_CUDA_VECTOR_CUH_

#include <cuda_runtime.h>
#include <stdint.h>

#include "codec_cuda.h"

namespace tfpar_cuda {

// Part i holds positions [offset[i], offset[i + 1]), position p at base[i] + p. No part is empty.
struct Parts {
  int64_t offset[TFPAR_CUDA_MAX_PARTS + 1];
  float* base[TFPAR_CUDA_MAX_PARTS];
  int32_t count;
};

// The quads of one thread.
struct Quads {
  int64_t first;   // position of the first element of the first quad, a multiple of 4
  int64_t stride;  // a multiple of 4
};

// The elements that the thread block works on: [first, first + size). Those from `limit` on do not exist.
struct Span {
  int64_t first;
  int64_t size;
  int64_t limit;

  __device__ bool IsWhole() const { return first + size <= limit; }
};

__device__ inline bool IsAligned(const float* pointer) { return (reinterpret_cast<uint64_t>(pointer) & 15u) == 0; }

// The part that holds `position`, or the last part if `position` lies past the end.
__device__ inline int FindPart(const Parts& parts, int64_t position) {
  int low = 0, high = parts.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) >> 1;
    if (parts.offset[middle] <= position) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

template <int kQuads>
__device__ inline void LoadWhole(const float* base, const Quads& quads, float (&v)[kQuads][4]) {
  if (IsAligned(base + quads.first)) {  // the same for all quads of the thread block
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
      const float4 quad = *reinterpret_cast<const float4*>(base + quads.first + k * quads.stride);
      v[k][0] = quad.x;
      v[k][1] = quad.y;
      v[k][2] = quad.z;
      v[k][3] = quad.w;
    }
  } else {
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[k][i] = base[quads.first + k * quads.stride + i];
    }
  }
}

template <int kQuads>
__device__ inline void StoreWhole(float* base, const Quads& quads, const float (&v)[kQuads][4]) {
  if (IsAligned(base + quads.first)) {
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
      // An intrinsic, because nvcc 13.0 splits plain stores of a float4 here. A streaming store, because the data is
      // not read again soon.
      __stcs(reinterpret_cast<float4*>(base + quads.first + k * quads.stride),
             make_float4(v[k][0], v[k][1], v[k][2], v[k][3]));
    }
  } else {
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) base[quads.first + k * quads.stride + i] = v[k][i];
    }
  }
}

// Loads elements of one array; zeros for elements that do not exist, or if `array` is null.
template <int kQuads>
__device__ inline void LoadArray(const float* array, const Span& span, const Quads& quads, float (&v)[kQuads][4]) {
  if (array != nullptr && span.IsWhole()) {
    LoadWhole(array, quads, v);
    return;
  }
  const int64_t limit = array != nullptr ? span.limit : 0;
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t position = quads.first + k * quads.stride + i;
      v[k][i] = position < limit ? array[position] : 0.0f;
    }
  }
}

template <int kQuads>
__device__ inline void StoreArray(float* array, const Span& span, const Quads& quads, const float (&v)[kQuads][4]) {
  if (span.IsWhole()) {
    StoreWhole(array, quads, v);
    return;
  }
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t position = quads.first + k * quads.stride + i;
      if (position < span.limit) array[position] = v[k][i];
    }
  }
}

// Calls visit(k, i, pointer) for every element that exists. The thread block's span begins in `part` and crosses the
// end of that part or of the vector.
template <int kQuads, typename Visit>
__device__ inline void VisitCrossing(const Parts& parts, int part, const Span& span, const Quads& quads, Visit visit) {
  int64_t end = parts.offset[part + 1];
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t position = quads.first + k * quads.stride + i;
      if (position < span.limit) {
        while (position >= end) end = parts.offset[++part + 1];
        visit(k, i, parts.base[part] + position);
      }
    }
  }
}

template <int kQuads>
__device__ inline void LoadParts(const Parts& parts, const Span& span, const Quads& quads, float (&v)[kQuads][4]) {
  const int part = FindPart(parts, span.first);
  if (span.IsWhole() && span.first + span.size <= parts.offset[part + 1]) {
    LoadWhole(parts.base[part], quads, v);
    return;
  }
#pragma unroll
  for (int k = 0; k < kQuads; ++k) v[k][0] = v[k][1] = v[k][2] = v[k][3] = 0.0f;
  VisitCrossing<kQuads>(parts, part, span, quads, [&](int k, int i, const float* element) { v[k][i] = *element; });
}

template <int kQuads>
__device__ inline void StoreParts(const Parts& parts, const Span& span, const Quads& quads,
                                  const float (&v)[kQuads][4]) {
  const int part = FindPart(parts, span.first);
  if (span.IsWhole() && span.first + span.size <= parts.offset[part + 1]) {
    StoreWhole(parts.base[part], quads, v);
    return;
  }
  VisitCrossing<kQuads>(parts, part, span, quads, [&](int k, int i, float* element) { *element = v[k][i]; });
}

}  // namespace tfpar_cuda

#endif  // TFPAR_OPS_CORE_CUDA_VECTOR_CUH_
