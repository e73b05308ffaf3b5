// Reads and checks the inputs of a kernel, in the same way on every device.
#ifndef TFPAR_OPS_KERNELS_ARGUMENTS_H_
#define TFPAR_OPS_KERNELS_ARGUMENTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tfpar_ops/core/codec.h"
#include "tfpar_ops/ops/codec_attrs.h"

namespace tfpar {

// Tensors seen as one vector. `Vector` is tfpar_vector or tfpar_mutable_vector, `Pointer` the type of its data
// pointers.
template <typename Vector, typename Pointer>
class Parts {
 public:
  void Add(Pointer data, int64_t elements) {
    data_.push_back(data);
    offset_.push_back(offset_.back() + elements);
  }

  // Valid until the next `Add`.
  Vector vector() const { return Vector{data_.data(), offset_.data(), static_cast<int64_t>(data_.size())}; }
  int64_t elements() const { return offset_.back(); }
  const std::vector<Pointer>& data() const { return data_; }
  const std::vector<int64_t>& offset() const { return offset_; }

 private:
  std::vector<Pointer> data_;
  std::vector<int64_t> offset_ = {0};
};

using InputParts = Parts<tfpar_vector, const float*>;
using OutputParts = Parts<tfpar_mutable_vector, float*>;

inline absl::Status ReadTensors(tensorflow::OpKernelContext* context, InputParts* parts) {
  tensorflow::OpInputList tensors;
  TF_RETURN_IF_ERROR(context->input_list("tensors", &tensors));
  for (const tensorflow::Tensor& tensor : tensors) {
    parts->Add(tensor.flat<float>().data(), tensor.NumElements());
  }
  return absl::OkStatus();
}

// A scalar in host memory.
inline absl::Status ReadBegin(tensorflow::OpKernelContext* context, const tfpar_codec& codec, int64_t* begin) {
  const tensorflow::Tensor* tensor;
  TF_RETURN_IF_ERROR(context->input("begin", &tensor));
  if (tensor->dims() != 0) {
    return Invalid("begin: shape ", tensor->shape().DebugString(), ", expected a scalar");
  }
  *begin = tensor->scalar<int64_t>()();
  if (*begin < 0 || *begin % codec.block != 0) {
    return Invalid("begin=", *begin, " is not a multiple of the block, ", codec.block);
  }
  return absl::OkStatus();
}

// A scalar in device memory. Kernels read it there, so that the host need not wait for the GPU.
inline absl::Status ReadFactor(tensorflow::OpKernelContext* context, const float** factor) {
  const tensorflow::Tensor* tensor;
  TF_RETURN_IF_ERROR(context->input("factor", &tensor));
  if (tensor->dims() != 0) {
    return Invalid("factor: shape ", tensor->shape().DebugString(), ", expected a scalar");
  }
  *factor = tensor->flat<float>().data();
  return absl::OkStatus();
}

// Reads the key and the step of the random numbers.
inline absl::Status ReadSeedStep(tensorflow::OpKernelContext* context, tfpar_codec* codec) {
  const tensorflow::Tensor* tensor;
  TF_RETURN_IF_ERROR(context->input("seed_step", &tensor));
  if (tensor->dims() != 1 || tensor->NumElements() != 2) {
    return Invalid("seed_step: shape ", tensor->shape().DebugString(), ", expected [2]");
  }
  codec->seed = static_cast<uint64_t>(tensor->vec<int64_t>()(0));
  codec->step = static_cast<uint64_t>(tensor->vec<int64_t>()(1));
  return absl::OkStatus();
}

inline absl::Status ReadMeasuresNorms(tensorflow::OpKernelContext* context, bool* measures_norms) {
  const tensorflow::Tensor* tensor;
  TF_RETURN_IF_ERROR(context->input("measures_norms", &tensor));
  if (tensor->dims() != 0) return Invalid("measures_norms: shape ", tensor->shape().DebugString(), ", expected a scalar");
  *measures_norms = tensor->scalar<bool>()();
  return absl::OkStatus();
}

inline absl::Status CheckResidualShape(const tensorflow::TensorShape& shape, int64_t elements, bool required) {
  if (shape.dims() == 1 && (shape.dim_size(0) == elements || (shape.dim_size(0) == 0 && !required))) {
    return absl::OkStatus();
  }
  return Invalid("residual: shape ", shape.DebugString(), ", expected [", elements, "]",
                 required ? "" : ", or [0] for none");
}

// Payloads of `elements` elements each, one per row.
struct Payloads {
  std::vector<const void*> rows;
  int64_t elements = 0;
  int64_t row_bytes = 0;
};

inline absl::Status ReadPayloads(tensorflow::OpKernelContext* context, Payloads* payloads) {
  const tensorflow::Tensor* tensor;
  TF_RETURN_IF_ERROR(context->input("payloads", &tensor));
  if (tensor->dims() != 2 || tensor->dim_size(0) < 1) {
    return Invalid("payloads: shape ", tensor->shape().DebugString(),
                   ", expected [payloads, words] with at least one payload");
  }
  payloads->row_bytes = tensor->dim_size(1) * 4;
  const char* data = static_cast<const char*>(tensor->data());
  for (int64_t row = 0; row < tensor->dim_size(0); ++row) {
    payloads->rows.push_back(data + row * payloads->row_bytes);
  }
  return absl::OkStatus();
}

// A residual that is read and written: an input whose buffer becomes an output, or a variable.
struct Residual {
  const float* old_values = nullptr;
  float* new_values = nullptr;
};

// A variable that holds the residual. It is locked from `Open` until this object is destroyed.
class ResidualVariable {
 public:
  ResidualVariable() = default;
  ResidualVariable(const ResidualVariable&) = delete;
  ResidualVariable& operator=(const ResidualVariable&) = delete;
  ~ResidualVariable() {
    if (locked_) variable_->mu()->unlock();
  }

  // If something else holds the buffer (an earlier read of the value), the new values go to a fresh buffer, as in every
  // update of a variable; in copy-on-read mode nothing else can hold it. A fresh buffer costs no copy: the kernel reads
  // the old values and writes the new ones anyway.
  absl::Status Open(tensorflow::OpKernelContext* context, int input, int64_t elements, Residual* residual) {
    TF_RETURN_IF_ERROR(tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, input), &variable_));
    variable_->mu()->lock();
    locked_ = true;
    tensorflow::Tensor* tensor = variable_->tensor();
    if (!variable_->is_initialized || !tensor->IsInitialized()) {
      return absl::FailedPreconditionError("residual: the variable is not initialized");
    }
    if (tensor->dtype() != tensorflow::DT_FLOAT) {
      return Invalid("residual: a variable of ", tensorflow::DataTypeString(tensor->dtype()), ", expected float32");
    }
    TF_RETURN_IF_ERROR(CheckResidualShape(tensor->shape(), elements, /*required=*/true));
    residual->old_values = tensor->flat<float>().data();
    if (variable_->copy_on_read_mode.load() || tensor->RefCountIsOne()) {
      residual->new_values = tensor->flat<float>().data();
      return absl::OkStatus();
    }
    tensorflow::AllocatorAttributes attributes;
    attributes.set_gpu_compatible(true);
    attributes.set_nic_compatible(true);
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_FLOAT, tensor->shape(), &fresh_, attributes));
    copies_ = true;
    residual->new_values = fresh_.flat<float>().data();
    return absl::OkStatus();
  }

  // To be called when the update is complete (on a GPU: queued on the stream).
  void Commit() {
    if (copies_) *variable_->tensor() = fresh_;
  }

 private:
  tensorflow::core::RefCountPtr<tensorflow::Var> variable_;
  tensorflow::Tensor fresh_;
  bool locked_ = false;
  bool copies_ = false;
};

}  // namespace tfpar

#endif  // TFPAR_OPS_KERNELS_ARGUMENTS_H_
