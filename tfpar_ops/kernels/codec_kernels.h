// The part of the kernels that is the same on every device. `Device` provides the rest:
//
//   static absl::Status CheckPayloads(const tfpar_codec&, const Payloads&);
//   static absl::Status Encode(OpKernelContext*, const tfpar_codec&, const InputParts&, const Shards&,
//                              const Residual&, bool measures_norms, int32_t* payload, float* norms);
//   static absl::Status Decode(OpKernelContext*, const tfpar_codec&, const Payloads&, const Shards&,
//                              const float* factor, const OutputParts&);
//   static absl::Status DecodeSum(OpKernelContext*, const tfpar_codec&, const Payloads&, const float* factor,
//                                 float* sum);
//   static absl::Status Recode(OpKernelContext*, const tfpar_codec&, const Payloads&, const float* factor,
//                              int64_t valid, int64_t begin, const Residual&, bool measures_norms, int32_t* payload,
//                              float* norms);
//   static absl::Status NormSquared(OpKernelContext*, const InputParts&, float* norm_squared, bool* finite);
#ifndef TFPAR_OPS_KERNELS_CODEC_KERNELS_H_
#define TFPAR_OPS_KERNELS_CODEC_KERNELS_H_

#include <cstdint>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tfpar_ops/kernels/arguments.h"

namespace tfpar {

using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

// Where an operation keeps its residual.
enum class Keeper { kTensor, kVariable };

// For an operation with the outputs payload, new residual (unless it is a variable) and norms: prepares the residual
// and the norms, and calls `work(residual, norms)`.
template <Keeper keeper, typename Work>
absl::Status WithResidual(OpKernelContext* context, int input, int64_t elements, const Work& work) {
  Residual residual;
  Tensor* norms;
  if constexpr (keeper == Keeper::kVariable) {
    TF_RETURN_IF_ERROR(context->allocate_output("norms", TensorShape({2}), &norms));
    ResidualVariable variable;
    TF_RETURN_IF_ERROR(variable.Open(context, input, elements, &residual));
    TF_RETURN_IF_ERROR(work(residual, norms->flat<float>().data()));
    variable.Commit();
    return absl::OkStatus();
  } else {
    TF_RETURN_IF_ERROR(context->allocate_output("norms", TensorShape({2}), &norms));
    const Tensor& old_residual = context->input(input);
    const TensorShape shape = old_residual.shape();
    TF_RETURN_IF_ERROR(CheckResidualShape(shape, elements, /*required=*/false));
    if (shape.num_elements() > 0) residual.old_values = old_residual.flat<float>().data();
    Tensor* new_residual;
    TF_RETURN_IF_ERROR(context->forward_input_or_allocate_output({input}, /*output_index=*/1, shape, &new_residual));
    if (shape.num_elements() > 0) residual.new_values = new_residual->flat<float>().data();
    return work(residual, norms->flat<float>().data());
  }
}

template <typename Device, Keeper keeper>
class EncodeOp : public OpKernel {
 public:
  explicit EncodeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadCodec(context, &codec_));
    OP_REQUIRES_OK(context, context->GetAttr("N", &residual_input_));
    OP_REQUIRES_OK(context, context->GetAttr("shards", &shards_));
    OP_REQUIRES_OK(context, context->GetAttr("shard_elements", &shard_elements_));
  }

  void Compute(OpKernelContext* context) override { OP_REQUIRES_OK(context, Encode(context)); }

 private:
  absl::Status Encode(OpKernelContext* context) const {
    tfpar_codec codec = codec_;
    InputParts parts;
    Shards shards;
    bool measures_norms;
    Tensor* payload;
    TF_RETURN_IF_ERROR(ReadSeedStep(context, &codec));
    TF_RETURN_IF_ERROR(ReadMeasuresNorms(context, &measures_norms));
    TF_RETURN_IF_ERROR(ReadTensors(context, &parts));
    TF_RETURN_IF_ERROR(MakeShards(codec, parts.elements(), shards_, shard_elements_, &shards));
    TensorShape shape;
    TF_RETURN_IF_ERROR(TensorShape::BuildTensorShape({shards.count, shards.words}, &shape));
    TF_RETURN_IF_ERROR(context->allocate_output("payload", shape, &payload));
    return WithResidual<keeper>(context, residual_input_, shards.total, [&](const Residual& residual, float* norms) {
      return Device::Encode(context, codec, parts, shards, residual, measures_norms, payload->flat<int32_t>().data(), norms);
    });
  }

  tfpar_codec codec_;
  int residual_input_;  // after the N tensors
  int64_t shards_;
  int64_t shard_elements_;
};

template <typename Device>
class DecodeOp : public OpKernel {
 public:
  explicit DecodeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadCodec(context, &codec_));
    OP_REQUIRES_OK(context, context->GetAttr("shapes", &shapes_));
    // Eager calls do not run the shape function.
    OP_REQUIRES(context, static_cast<int>(shapes_.size()) == context->num_outputs(),
                Invalid("N=", context->num_outputs(), ", but there are ", shapes_.size(), " shapes"));
    OP_REQUIRES_OK(context, context->GetAttr("shard_elements", &shard_elements_));
  }

  void Compute(OpKernelContext* context) override { OP_REQUIRES_OK(context, Decode(context)); }

 private:
  absl::Status Decode(OpKernelContext* context) const {
    Payloads payloads;
    const float* factor = nullptr;
    Shards shards;
    int64_t total = 0;
    for (const TensorShape& shape : shapes_) TF_RETURN_IF_ERROR(AddElements(shape.num_elements(), &total));
    TF_RETURN_IF_ERROR(ReadFactor(context, &factor));
    TF_RETURN_IF_ERROR(ReadPayloads(context, &payloads));
    TF_RETURN_IF_ERROR(MakeShards(codec_, total, payloads.rows.size(), shard_elements_, &shards));
    payloads.elements = shards.elements;
    TF_RETURN_IF_ERROR(Device::CheckPayloads(codec_, payloads));
    tensorflow::OpOutputList tensors;
    OutputParts parts;
    TF_RETURN_IF_ERROR(context->output_list("tensors", &tensors));
    for (int i = 0; i < tensors.size(); ++i) {
      Tensor* tensor;
      TF_RETURN_IF_ERROR(tensors.allocate(i, shapes_[i], &tensor));
      parts.Add(tensor->flat<float>().data(), tensor->NumElements());
    }
    return Device::Decode(context, codec_, payloads, shards, factor, parts);
  }

  tfpar_codec codec_;
  std::vector<TensorShape> shapes_;
  int64_t shard_elements_;
};

template <typename Device>
class DecodeSumOp : public OpKernel {
 public:
  explicit DecodeSumOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadCodec(context, &codec_));
    OP_REQUIRES_OK(context, context->GetAttr("elements", &elements_));
  }

  void Compute(OpKernelContext* context) override { OP_REQUIRES_OK(context, DecodeSum(context)); }

 private:
  absl::Status DecodeSum(OpKernelContext* context) const {
    Payloads payloads;
    const float* factor = nullptr;
    Tensor* sum;
    TF_RETURN_IF_ERROR(ReadFactor(context, &factor));
    TF_RETURN_IF_ERROR(ReadPayloads(context, &payloads));
    payloads.elements = elements_;
    TF_RETURN_IF_ERROR(Device::CheckPayloads(codec_, payloads));
    TF_RETURN_IF_ERROR(context->allocate_output("sum", TensorShape({elements_}), &sum));
    return Device::DecodeSum(context, codec_, payloads, factor, sum->flat<float>().data());
  }

  tfpar_codec codec_;
  int64_t elements_;
};

template <typename Device, Keeper keeper>
class RecodeOp : public OpKernel {
 public:
  explicit RecodeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadCodec(context, &codec_));
    OP_REQUIRES_OK(context, context->GetAttr("elements", &elements_));
    OP_REQUIRES_OK(context, context->GetAttr("valid", &valid_));
    OP_REQUIRES(context, valid_ <= elements_, Invalid("valid=", valid_, " is more than elements=", elements_));
    OP_REQUIRES_OK(context, PayloadWords(codec_, elements_, &words_));
  }

  void Compute(OpKernelContext* context) override { OP_REQUIRES_OK(context, Recode(context)); }

 private:
  absl::Status Recode(OpKernelContext* context) const {
    tfpar_codec codec = codec_;
    Payloads payloads;
    const float* factor = nullptr;
    int64_t begin = 0;
    bool measures_norms;
    Tensor* payload;
    TF_RETURN_IF_ERROR(ReadSeedStep(context, &codec));
    TF_RETURN_IF_ERROR(ReadMeasuresNorms(context, &measures_norms));
    TF_RETURN_IF_ERROR(ReadFactor(context, &factor));
    TF_RETURN_IF_ERROR(ReadBegin(context, codec, &begin));
    TF_RETURN_IF_ERROR(ReadPayloads(context, &payloads));
    payloads.elements = elements_;
    TF_RETURN_IF_ERROR(Device::CheckPayloads(codec, payloads));
    TF_RETURN_IF_ERROR(context->allocate_output("payload", TensorShape({1, words_}), &payload));
    return WithResidual<keeper>(context, 2, valid_, [&](const Residual& residual, float* norms) {
      return Device::Recode(context, codec, payloads, factor, valid_, begin, residual, measures_norms,
                            payload->flat<int32_t>().data(), norms);
    });
  }

  tfpar_codec codec_;
  int64_t elements_;
  int64_t valid_;
  int64_t words_;
};

template <typename Device>
class NormSquaredOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override { OP_REQUIRES_OK(context, NormSquared(context)); }

 private:
  absl::Status NormSquared(OpKernelContext* context) const {
    InputParts parts;
    Tensor* norm_squared;
    Tensor* finite;
    TF_RETURN_IF_ERROR(ReadTensors(context, &parts));
    TF_RETURN_IF_ERROR(context->allocate_output("norm_squared", TensorShape({}), &norm_squared));
    TF_RETURN_IF_ERROR(context->allocate_output("finite", TensorShape({}), &finite));
    return Device::NormSquared(context, parts, norm_squared->flat<float>().data(), finite->flat<bool>().data());
  }
};

#define TFPAR_HOST_INPUTS HostMemory("seed_step").HostMemory("measures_norms")

// Registers every kernel for a device. Inputs that the host needs before it can start the work are in host memory.
#define TFPAR_REGISTER_KERNELS(NAME, DEVICE)                                                                       \
  REGISTER_KERNEL_BUILDER(Name("TfparEncode").Device(NAME).TFPAR_HOST_INPUTS,                                      \
                          ::tfpar::EncodeOp<DEVICE, ::tfpar::Keeper::kTensor>);                                    \
  REGISTER_KERNEL_BUILDER(Name("TfparEncodeResource").Device(NAME).HostMemory("residual").TFPAR_HOST_INPUTS,       \
                          ::tfpar::EncodeOp<DEVICE, ::tfpar::Keeper::kVariable>);                                  \
  REGISTER_KERNEL_BUILDER(Name("TfparDecode").Device(NAME), ::tfpar::DecodeOp<DEVICE>);                            \
  REGISTER_KERNEL_BUILDER(Name("TfparDecodeSum").Device(NAME), ::tfpar::DecodeSumOp<DEVICE>);                      \
  REGISTER_KERNEL_BUILDER(Name("TfparRecode").Device(NAME).HostMemory("begin").TFPAR_HOST_INPUTS,                  \
                          ::tfpar::RecodeOp<DEVICE, ::tfpar::Keeper::kTensor>);                                    \
  REGISTER_KERNEL_BUILDER(                                                                                         \
      Name("TfparRecodeResource").Device(NAME).HostMemory("residual").HostMemory("begin").TFPAR_HOST_INPUTS,       \
      ::tfpar::RecodeOp<DEVICE, ::tfpar::Keeper::kVariable>);                                                      \
  REGISTER_KERNEL_BUILDER(Name("TfparNormSquared").Device(NAME), ::tfpar::NormSquaredOp<DEVICE>)

}  // namespace tfpar

#endif  // TFPAR_OPS_KERNELS_CODEC_KERNELS_H_
