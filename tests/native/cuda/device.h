// Wrappers that call the functions of codec_cuda.h with std::vectors, like those of ../cases.h for codec.h.
#ifndef TFPAR_TESTS_NATIVE_CUDA_DEVICE_H_
#define TFPAR_TESTS_NATIVE_CUDA_DEVICE_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "../../../tfpar_ops/core/cuda/codec_cuda.h"
#include "../cases.h"
#include "../check.h"

#if defined(TFPAR_EMULATION)
constexpr bool kEmulated = true;
#else
constexpr bool kEmulated = false;
#endif

namespace device {

// Ends the program on a CUDA error: after one, every later call fails too.
inline void Must(int error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: CUDA error %d, %s\n", what, error, cudaGetErrorString(static_cast<cudaError_t>(error)));
  std::exit(1);
}

// An array in device memory, `shift` elements past a multiple of 256 bytes, with a margin on both sides that must not
// change. In the emulation, memory ends `shift` elements after the array.
template <typename T>
class Array {
 public:
  explicit Array(const std::vector<T>& values, size_t shift = 0) : size_(values.size()), before_(kMargin + shift) {
    const size_t after = kEmulated ? shift : kMargin;
    all_ = std::vector<uint8_t>((before_ + size_ + after) * sizeof(T), kGuard);
    std::copy(Bytes(values.data()), Bytes(values.data() + size_),
              all_.begin() + static_cast<int64_t>(before_ * sizeof(T)));
    void* memory = nullptr;
    Must(cudaMalloc(&memory, all_.size()), "cudaMalloc");
    memory_ = static_cast<T*>(memory);
    Must(cudaMemcpy(memory_, all_.data(), all_.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  Array(size_t size, T value) : Array(std::vector<T>(size, value)) {}
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { cudaFree(memory_); }

  T* data() const { return memory_ + before_; }

  // Waits for the device.
  std::vector<T> Read() {
    Must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    Must(cudaMemcpy(all_.data(), memory_, all_.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    const size_t first = before_ * sizeof(T), last = first + size_ * sizeof(T);
    for (size_t i = 0; i < all_.size(); ++i) {
      CHECK((i >= first && i < last) || all_[i] == kGuard, "written outside of an array");
    }
    std::vector<T> values(size_);
    std::copy(all_.begin() + static_cast<int64_t>(first), all_.begin() + static_cast<int64_t>(last),
              reinterpret_cast<uint8_t*>(values.data()));
    return values;
  }

 private:
  static constexpr size_t kMargin = 256 / sizeof(T);
  static constexpr uint8_t kGuard = 0xC3;
  static const uint8_t* Bytes(const T* values) { return reinterpret_cast<const uint8_t*>(values); }

  size_t size_, before_;
  std::vector<uint8_t> all_;
  T* memory_;
};

// A vector whose parts are separate arrays, each at a different address modulo 16.
class Pieces {
 public:
  Pieces(const cases::Floats& values, const std::vector<int64_t>& cuts) {
    std::vector<int64_t> ends = cuts;
    ends.push_back(static_cast<int64_t>(values.size()));
    for (int64_t end : ends) {
      const cases::Floats part(values.begin() + offset_.back(), values.begin() + end);
      parts_.push_back(std::make_unique<Array<float>>(part, parts_.size() % 4));
      pointers_.push_back(parts_.back()->data());
      offset_.push_back(end);
    }
  }
  tfpar_vector View() const { return {pointers_.data(), offset_.data(), static_cast<int64_t>(parts_.size())}; }
  tfpar_mutable_vector MutableView() { return {pointers_.data(), offset_.data(), static_cast<int64_t>(parts_.size())}; }
  cases::Floats Joined() {
    cases::Floats all;
    for (const auto& part : parts_) {
      const cases::Floats values = part->Read();
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }

 private:
  std::vector<std::unique_ptr<Array<float>>> parts_;
  std::vector<float*> pointers_;
  std::vector<int64_t> offset_ = {0};
};

// Payloads in device memory. Every second one is at a multiple of 4 bytes, but not of 8.
class Payloads {
 public:
  explicit Payloads(const std::vector<cases::Bytes>& payloads) {
    for (const cases::Bytes& payload : payloads) {
      arrays_.push_back(std::make_unique<Array<uint8_t>>(payload, arrays_.size() % 2 * 4));
      pointers_.push_back(arrays_.back()->data());
    }
  }
  const void* const* data() const { return pointers_.data(); }
  int64_t count() const { return static_cast<int64_t>(pointers_.size()); }

 private:
  std::vector<std::unique_ptr<Array<uint8_t>>> arrays_;
  std::vector<const void*> pointers_;
};

// Variations of a call that must not change its result.
struct Manner {
  bool in_place;       // the new residual takes the place of the old one
  bool device_factor;  // factor in device memory
  size_t shift;        // of the residual and the payload, in float32 elements
};

// The outputs of an encoder.
class Target {
 public:
  Target(const tfpar_codec& codec, int64_t n, int64_t valid, const cases::Floats& residual, const Manner& manner)
      : payload_(std::vector<uint8_t>(static_cast<size_t>(tfpar_payload_bytes(&codec, n)), 0xEE), 4 * manner.shift),
        residual_(residual, manner.shift),
        new_residual_(std::vector<float>(static_cast<size_t>(valid), 7.0f), manner.shift),
        norms_(2, -7.0),
        scratch_(static_cast<size_t>(tfpar_cuda_scratch_bytes(&codec, n)), 0xEE),
        has_residual_(!residual.empty()),
        in_place_(manner.in_place && has_residual_) {}

  const float* residual() const { return has_residual_ ? residual_.data() : nullptr; }
  float* new_residual() const { return in_place_ ? residual_.data() : new_residual_.data(); }
  void* payload() const { return payload_.data(); }
  double* norms() const { return norms_.data(); }
  void* scratch() const { return scratch_.data(); }

  cases::Encoded Read() {
    scratch_.Read();
    return {payload_.Read(), in_place_ ? residual_.Read() : new_residual_.Read(), norms_.Read()};
  }

 private:
  Array<uint8_t> payload_;
  Array<float> residual_, new_residual_;
  Array<double> norms_;
  Array<uint8_t> scratch_;
  bool has_residual_, in_place_;
};

inline cases::Encoded Encode(const tfpar_codec& codec, const cases::Floats& x, const std::vector<int64_t>& cuts,
                             int64_t begin, int64_t n, const cases::Floats& residual, const Manner& manner) {
  const Pieces pieces(x, cuts);
  const tfpar_vector view = pieces.View();
  const int64_t valid = std::max<int64_t>(0, std::min(n, static_cast<int64_t>(x.size()) - begin));
  Target target(codec, n, valid, residual, manner);
  Must(tfpar_cuda_encode(&codec, &view, begin, n, target.residual(), target.new_residual(), target.payload(),
                         target.norms(), target.scratch(), nullptr),
       "tfpar_cuda_encode");
  return target.Read();
}

// Returns the whole vector of `size` elements; the call writes [begin, begin + n) of it.
inline cases::Floats DecodeSum(const tfpar_codec& codec, int64_t n, const std::vector<cases::Bytes>& payloads,
                               float factor, int64_t size, const std::vector<int64_t>& cuts, int64_t begin,
                               const Manner& manner, int* status) {
  Pieces pieces(cases::Floats(static_cast<size_t>(size), -5.0f), cuts);
  const tfpar_mutable_vector view = pieces.MutableView();
  const Payloads on_device(payloads);
  const Array<float> device_factor(1, factor);
  Array<int32_t> device_status(1, 0);
  Must(tfpar_cuda_decode_sum(&codec, n, on_device.data(), on_device.count(), manner.device_factor ? -3.0f : factor,
                             manner.device_factor ? device_factor.data() : nullptr, &view, begin, device_status.data(),
                             nullptr),
       "tfpar_cuda_decode_sum");
  *status = device_status.Read()[0];
  return pieces.Joined();
}

inline cases::Encoded Recode(const tfpar_codec& codec, int64_t n, const std::vector<cases::Bytes>& payloads,
                             float factor, int64_t valid, int64_t begin, const cases::Floats& residual,
                             const Manner& manner, int* status) {
  const Payloads on_device(payloads);
  const Array<float> device_factor(1, factor);
  Array<int32_t> device_status(1, 0);
  Target target(codec, n, valid, residual, manner);
  Must(tfpar_cuda_recode(&codec, n, on_device.data(), on_device.count(), manner.device_factor ? -3.0f : factor,
                         manner.device_factor ? device_factor.data() : nullptr, valid, begin, target.residual(),
                         target.new_residual(), target.payload(), target.norms(), target.scratch(),
                         device_status.data(), nullptr),
       "tfpar_cuda_recode");
  *status = device_status.Read()[0];
  return target.Read();
}

}  // namespace device

#endif  // TFPAR_TESTS_NATIVE_CUDA_DEVICE_H_
