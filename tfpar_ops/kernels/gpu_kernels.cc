// The kernels on CUDA devices: they queue work on TensorFlow's stream and do not wait for it. The C++ compiler compiles
// this file; the code that runs on the device is behind codec_cuda.h.
//
// A device cannot reject a payload unless the host waits for it. Lengths are checked here, but a payload with a wrong
// header or a topk position outside of its block makes the result NaN instead of raising an error.
#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tfpar_ops/core/codec.h"
#include "tfpar_ops/core/cuda/codec_cuda.h"
#include "tfpar_ops/kernels/arguments.h"
#include "tfpar_ops/kernels/codec_kernels.h"
#include "xla/stream_executor/stream.h"  // stream_executor.h needs headers of LLVM, which TensorFlow 2.19 leaves out

// Functions of the CUDA runtime, declared here because this file does not need its headers. Errors are an enum, passed as
// int.
extern "C" const char* cudaGetErrorString(int error);
extern "C" int cudaMemsetAsync(void* memory, int value, size_t bytes, void* stream);

namespace tfpar {
namespace {

void* StreamOf(OpKernelContext* context) {
  return context->op_device_context()->stream()->platform_specific_handle().stream;
}

// A value of the same enum: more small tensors in one place than a launch has room for.
constexpr int kNotSupported = 801;

absl::Status Checked(int error) {
  if (error == 0) return absl::OkStatus();
  if (error == kNotSupported) {
    return Invalid("more than ", TFPAR_CUDA_MAX_PARTS,
                   " tensors that are not empty meet in one block, or in 4096 elements; concatenate the small ones");
  }
  return absl::InternalError(absl::StrCat("CUDA error ", error, ": ", cudaGetErrorString(error)));
}

// Writes the norms of payloads, which are zero for a residual that nobody keeps; or NaN, although they were computed beside the
// payloads.
absl::Status FinishNorms(const double* sums, int64_t count, const Residual& residual, bool measures_norms, float* norms,
                         void* stream) {
  if (!measures_norms) return Checked(cudaMemsetAsync(norms, 0xFF, 2 * sizeof(float), stream));
  TF_RETURN_IF_ERROR(Checked(tfpar_cuda_finish_norms(sums, count, norms, stream)));
  if (residual.old_values != nullptr) return absl::OkStatus();
  return Checked(cudaMemsetAsync(norms + 1, 0, sizeof(float), stream));
}

// Device memory for one call. It may be freed while kernels are still queued: TensorFlow reuses it in stream order.
class Workspace {
 public:
  absl::Status Allocate(OpKernelContext* context, const tfpar_codec* codec, int64_t elements, int64_t sums) {
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_DOUBLE, TensorShape({sums}), &sums_));
    const int64_t bytes = tfpar_cuda_scratch_bytes(codec, elements);
    if (bytes < 0) return Invalid("a vector of ", elements, " elements is too long");
    return context->allocate_temp(tensorflow::DT_INT8, TensorShape({bytes}), &scratch_);
  }

  double* sums() { return sums_.flat<double>().data(); }
  void* scratch() { return scratch_.data(); }

 private:
  Tensor sums_;
  Tensor scratch_;
};

struct Gpu {
  static absl::Status CheckPayloads(const tfpar_codec& codec, const Payloads& payloads) {
    const int64_t bytes = tfpar_payload_bytes(&codec, payloads.elements);
    if (payloads.row_bytes != bytes) {
      return Invalid("payloads: rows of ", payloads.row_bytes, " bytes, expected ", bytes, " for ", payloads.elements,
                     " elements");
    }
    return absl::OkStatus();
  }

  static absl::Status CheckPeers(const Payloads& payloads) {
    if (payloads.rows.size() > TFPAR_CUDA_MAX_PEERS) {
      return Invalid("payloads: ", payloads.rows.size(), " of them, at most ", TFPAR_CUDA_MAX_PEERS,
                     " can be summed in one call on a GPU");
    }
    return absl::OkStatus();
  }

  static absl::Status Encode(OpKernelContext* context, const tfpar_codec& codec, const InputParts& parts,
                             const Shards& shards, const Residual& residual, bool measures_norms,
                             int32_t* payload, float* norms) {
    void* stream = StreamOf(context);
    const tfpar_vector x = parts.vector();
    Workspace workspace;
    TF_RETURN_IF_ERROR(workspace.Allocate(context, &codec, shards.elements, 2 * shards.count));
    for (int64_t i = 0; i < shards.count; ++i) {
      const int64_t begin = i * shards.elements;
      const int64_t offset = std::min(begin, shards.total);  // a shard past the end has no residual
      const bool has_residual = residual.old_values != nullptr;
      TF_RETURN_IF_ERROR(Checked(
          tfpar_cuda_encode(&codec, &x, begin, shards.elements, has_residual ? residual.old_values + offset : nullptr,
                            has_residual ? residual.new_values + offset : nullptr, payload + i * shards.words,
                            workspace.sums() + 2 * i, workspace.scratch(), stream)));
    }
    return FinishNorms(workspace.sums(), shards.count, residual, measures_norms, norms, stream);
  }

  static absl::Status Decode(OpKernelContext* context, const tfpar_codec& codec, const Payloads& payloads,
                             const Shards& shards, const float* factor, const OutputParts& parts) {
    const tfpar_mutable_vector out = parts.vector();
    for (int64_t i = 0; i < shards.count && shards.valid(i) > 0; ++i) {
      TF_RETURN_IF_ERROR(Checked(tfpar_cuda_decode_sum(&codec, shards.elements, &payloads.rows[i], 1, 0, factor, &out,
                                                       i * shards.elements, nullptr, StreamOf(context))));
    }
    return absl::OkStatus();
  }

  static absl::Status DecodeSum(OpKernelContext* context, const tfpar_codec& codec, const Payloads& payloads,
                                const float* factor, float* sum) {
    TF_RETURN_IF_ERROR(CheckPeers(payloads));
    OutputParts parts;
    parts.Add(sum, payloads.elements);
    const tfpar_mutable_vector out = parts.vector();
    return Checked(tfpar_cuda_decode_sum(&codec, payloads.elements, payloads.rows.data(), payloads.rows.size(), 0,
                                         factor, &out, 0, nullptr, StreamOf(context)));
  }

  static absl::Status Recode(OpKernelContext* context, const tfpar_codec& codec, const Payloads& payloads,
                             const float* factor, int64_t valid, int64_t begin, const Residual& residual,
                             bool measures_norms, int32_t* payload, float* norms) {
    TF_RETURN_IF_ERROR(CheckPeers(payloads));
    void* stream = StreamOf(context);
    Workspace workspace;
    TF_RETURN_IF_ERROR(workspace.Allocate(context, &codec, payloads.elements, 2));
    TF_RETURN_IF_ERROR(Checked(tfpar_cuda_recode(&codec, payloads.elements, payloads.rows.data(), payloads.rows.size(),
                                                 0, factor, valid, begin, residual.old_values, residual.new_values,
                                                 payload, workspace.sums(), workspace.scratch(), nullptr, stream)));
    return FinishNorms(workspace.sums(), 1, residual, measures_norms, norms, stream);
  }

  static absl::Status NormSquared(OpKernelContext* context, const InputParts& parts, float* norm_squared,
                                  bool* finite) {
    void* stream = StreamOf(context);
    const tfpar_vector x = parts.vector();
    Workspace workspace;
    TF_RETURN_IF_ERROR(workspace.Allocate(context, nullptr, parts.elements(), 1));
    TF_RETURN_IF_ERROR(
        Checked(tfpar_cuda_sum_squares(&x, 0, parts.elements(), workspace.sums(), workspace.scratch(), stream)));
    return Checked(tfpar_cuda_finish_sum(workspace.sums(), norm_squared, finite, stream));
  }
};

TFPAR_REGISTER_KERNELS(::tensorflow::DEVICE_GPU, Gpu);

}  // namespace
}  // namespace tfpar
