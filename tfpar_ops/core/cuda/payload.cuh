// Payloads in a kernel's parameters: one to write, or several to read.
#ifndef TFPAR_OPS_CORE_CUDA_PAYLOAD_CUH_
#define TFPAR_OPS_CORE_CUDA_PAYLOAD_CUH_

#include <cuda_runtime.h>
#include <stdint.h>

#include "../layout.h"
#include "arithmetic.cuh"
#include "codec_cuda.h"

namespace tfpar_cuda {

// What payloads of one codec and length have in common.
struct Layout {
  tfpar::Header header;
  int64_t blocks;
  int64_t scales_at;    // byte at which the scales begin
  int64_t padding_at;   // byte at which the closing zeros begin
  int64_t bytes;        // of the whole payload
  int32_t log_block;    // log2 of the elements per block
  int32_t block_bytes;  // bytes of codes per block
  int32_t scale_bytes;
  int32_t keep;
  // The bits of 2^23. Not a constant, as the instruction that takes a code out of a word and puts it into a significand
  // has room for one only.
  uint32_t significand;
};

__device__ inline const uint8_t* BlockCodes(const uint8_t* payload, const Layout& layout, int64_t block) {
  return payload + tfpar::kHeaderBytes + block * layout.block_bytes;
}

__device__ inline uint8_t* BlockCodes(uint8_t* payload, const Layout& layout, int64_t block) {
  return payload + tfpar::kHeaderBytes + block * layout.block_bytes;
}

// All threads of one thread block call this; it must have at least 32 threads.
__device__ inline void WriteFrame(uint8_t* payload, const Layout& layout) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < 4) reinterpret_cast<uint32_t*>(payload)[thread] = layout.header.word[thread];
  if (thread >= 16 && thread < 32 && layout.padding_at + thread - 16 < layout.bytes) {
    payload[layout.padding_at + thread - 16] = 0;
  }
}

// A scale of 2 or 4 bytes is the upper bytes of a float32; a scale of one byte is an exponent.
__device__ inline void WriteScale(uint8_t* payload, const Layout& layout, int64_t block, uint32_t scale) {
  uint8_t* at = payload + layout.scales_at + block * layout.scale_bytes;
  if (layout.scale_bytes == 1) *at = static_cast<uint8_t>(scale);
  if (layout.scale_bytes == 2) *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(scale >> 16);
  if (layout.scale_bytes == 4) *reinterpret_cast<uint32_t*>(at) = scale;
}

// LoadScale returns the stored scale, ScaleBits its meaning. They are separate so that many loads can be in flight.
template <bool kOneByte>
__device__ inline uint32_t LoadScale(const uint8_t* payload, const Layout& layout, int64_t block) {
  const uint8_t* at = payload + layout.scales_at + block * layout.scale_bytes;
  if (kOneByte) return *at;
  return layout.scale_bytes == 2 ? *reinterpret_cast<const uint16_t*>(at) : *reinterpret_cast<const uint32_t*>(at);
}

// Returns the bits of a float32; a scale of one byte is returned unchanged. Encoders write neither -0 nor denormals:
// they count as 0.
template <bool kOneByte>
__device__ inline uint32_t ScaleBits(uint32_t stored, const Layout& layout) {
  if (kOneByte) return stored;
  const uint32_t bits = layout.scale_bytes == 2 ? stored << 16 : stored;
  return (bits & 0x7FFFFFFFu) < kTinyBits ? 0u : bits;
}

// Payloads to be added up.
struct Peers {
  const uint8_t* payload[TFPAR_CUDA_MAX_PEERS];
  int32_t count;
  float factor;
  const float* device_factor;  // used instead of `factor` unless null
  int32_t* status;             // may be null
};

__device__ inline float Factor(const Peers& peers) {
  return peers.device_factor != nullptr ? *peers.device_factor : peers.factor;
}

// The header of payload `peer`; the expected header if there is no such payload.
__device__ inline tfpar::Header LoadHeader(const Peers& peers, const Layout& layout, int peer) {
  tfpar::Header header;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool exists = peer < peers.count;
    header.word[i] = exists ? reinterpret_cast<const uint32_t*>(peers.payload[peer])[i] : layout.header.word[i];
  }
  return header;
}

__device__ inline bool IsForeign(const tfpar::Header& header, const Layout& layout) {
  bool foreign = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) foreign |= header.word[i] != layout.header.word[i];
  return foreign;
}

// No race: every thread that calls this writes the same value.
__device__ inline void ReportInvalid(const Peers& peers) {
  if (peers.status != nullptr) *peers.status = 1;
}

}  // namespace tfpar_cuda

#endif  // TFPAR_OPS_CORE_CUDA_PAYLOAD_CUH_
