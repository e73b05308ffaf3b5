// The exchange of encoded gradients as one operation, which takes no thread of TensorFlow while it waits.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/threadpool.h"
#include "tfpar_ops/kernels/arguments.h"
#include "tfpar_ops/ops/codec_attrs.h"
#include "tfpar_ops/transport/coded_exchange.h"
#include "tfpar_ops/transport/started_call.h"

namespace tfpar {
namespace {

using ::tensorflow::AsyncOpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::shape_inference::InferenceContext;

// Vectors of more elements are spread over TensorFlow's threads. Of smaller ones, several are exchanged at the same time, each
// in the thread of its call.
constexpr int64_t kAlone = int64_t{8} << 20;

// The sums have the shapes of the tensors. The outputs after them are vectors of fixed length.
absl::Status Shapes(InferenceContext* c, bool returns_residuals) {
  int count;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &count));
  for (int i = 0; i < count; ++i) c->set_output(i, c->input(i));
  for (int i = 0; returns_residuals && i < 2; ++i) c->set_output(count + i, c->input(count + i));
  c->set_output(c->num_outputs() - 1, c->Vector(2));
  return absl::OkStatus();
}

#define TFPAR_EXCHANGE_DOC                                                                                              \
  "Encodes tensors, seen as one vector, plus the worker's residual; sums what the members sent in their order; encodes " \
  "the sums plus the owner's residual again, and decodes them on all members: the same bits as TfparEncode, an "         \
  "all-to-all, TfparRecode, an all-gather and TfparDecode. seed_steps: of the worker's payloads, and of the sums. "      \
  "measures_norms: if false, the norms are NaN, and take no time."

REGISTER_OP("TfparExchange")
    .Input("tensors: N * float")
    .Input("worker_residual: float")
    .Input("owner_residual: float")
    .Input("seed_steps: int64")
    .Input("measures_norms: bool")
    .Input("instance: int32")
    .Output("sums: N * float")
    .Output("new_worker_residual: float")
    .Output("new_owner_residual: float")
    .Output("norms: float")
    .Attr("N: int >= 1")
    .TFPAR_CODEC_ATTRS.TFPAR_GROUP_ATTRS.SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return Shapes(c, true); })
    .Doc(TFPAR_EXCHANGE_DOC);

REGISTER_OP("TfparExchangeResource")
    .Input("tensors: N * float")
    .Input("worker_residual: resource")
    .Input("owner_residual: resource")
    .Input("seed_steps: int64")
    .Input("measures_norms: bool")
    .Input("instance: int32")
    .Output("sums: N * float")
    .Output("norms: float")
    .Attr("N: int >= 1")
    .TFPAR_CODEC_ATTRS.TFPAR_GROUP_ATTRS.SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return Shapes(c, false); })
    .Doc(TFPAR_EXCHANGE_DOC " The residuals are variables, which are changed in place.");

// The variables of an exchange; locked until they are reset, by the thread that opened them.
struct Variables {
  std::optional<ResidualVariable> worker, owner;
};

template <bool kVariables>
class ExchangeKernel : public AsyncOpKernel {
 public:
  explicit ExchangeKernel(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadGroup(ctx, &mesh_, &call_));
    OP_REQUIRES_OK(ctx, ReadCodec(ctx, &codec_));
    OP_REQUIRES(ctx, codec_.keep == 0, Invalid("kind: a codec that keeps some elements has no pipelined exchange"));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &tensors_));
    call_.collective = Collective::kCodedExchange;
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    Call call = call_;
    auto exchange = std::make_shared<CodedExchange>();
    Tensor* norms = nullptr;
    const absl::Status prepared = Prepare(ctx, call, *exchange, &norms);
    call.bytes = exchange->total;
    call.element_bytes = static_cast<size_t>(codec_.kind) << 40 | static_cast<size_t>(codec_.scale_bits) << 32 |
                         static_cast<size_t>(codec_.block);
    std::shared_ptr<Variables> variables;
    if constexpr (kVariables) {
      variables = std::make_shared<Variables>();
      call.prepare = [this, ctx, exchange, variables] { return Open(ctx, *exchange, *variables); };
    }
    call.done = [exchange, norms, variables](const Outcome& outcome) {
      const bool complete = outcome.kind == Outcome::kDone;
      for (int i = 0; complete && i < 2; ++i) norms->flat<float>()(i) = exchange->norms[i];
      if (!variables) return;
      for (auto* variable : {&variables->worker, &variables->owner}) {
        if (complete) (*variable)->Commit();
        variable->reset();
      }
    };
    call.coded = std::move(exchange);
    StartCall(ctx, mesh_, prepared, std::move(call), std::move(done));
  }

 private:
  absl::Status Prepare(OpKernelContext* ctx, Call& call, CodedExchange& exchange, Tensor** norms) {
    TF_RETURN_IF_ERROR(ReadInstance(ctx, &call));
    TF_RETURN_IF_ERROR(ctx->allocate_output("norms", TensorShape({2}), norms));
    exchange.codec = codec_;
    const Tensor& seed_steps = ctx->input(tensors_ + 2);
    if (seed_steps.dims() != 2 || seed_steps.NumElements() != 4) {
      return Invalid("seed_steps: shape ", seed_steps.shape().DebugString(), ", expected [2, 2]");
    }
    const auto seeds = seed_steps.matrix<int64_t>();
    if (seeds(0, 1) != seeds(1, 1)) return Invalid("seed_steps: two steps");
    exchange.codec.seed = static_cast<uint64_t>(seeds(0, 0));
    exchange.codec.step = static_cast<uint64_t>(seeds(0, 1));
    exchange.owner_seed = static_cast<uint64_t>(seeds(1, 0));
    const Tensor& measures_norms = ctx->input(tensors_ + 3);
    if (measures_norms.dims() != 0) return Invalid("measures_norms: no scalar");
    exchange.measures_norms = measures_norms.scalar<bool>()();
    exchange.offsets.push_back(0);
    for (int i = 0; i < tensors_; ++i) {
      Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(ctx->forward_input_or_allocate_output({i}, i, ctx->input(i).shape(), &output));
      exchange.inputs.push_back(ctx->input(i).flat<float>().data());
      exchange.outputs.push_back(output->flat<float>().data());
      TF_RETURN_IF_ERROR(AddElements(output->NumElements(), &exchange.total));
      exchange.offsets.push_back(exchange.total);
    }
    Shards shards;
    TF_RETURN_IF_ERROR(MakeShards(codec_, exchange.total, static_cast<int64_t>(call.members.size()), 0, &shards));
    exchange.shard = shards.elements;
    auto* threads = ctx->device()->tensorflow_cpu_worker_threads();
    exchange.threads = threads->num_threads;
    if (exchange.total > kAlone && threads->num_threads > 1) {
      exchange.for_each = [pool = threads->workers](int64_t units, const std::function<void(int64_t)>& work) {
        pool->ParallelFor(units, kUnitElements, [&work](int64_t first, int64_t last) {
          for (int64_t unit = first; unit < last; ++unit) work(unit);
        });
      };
    }
    if constexpr (kVariables) return absl::OkStatus();
    const int64_t owned = shards.valid(call.place);
    TF_RETURN_IF_ERROR(NextResidual(ctx, tensors_, shards.total, &exchange.worker_residual, &exchange.new_worker_residual));
    return NextResidual(ctx, tensors_ + 1, owned, &exchange.owner_residual, &exchange.new_owner_residual);
  }

  static absl::Status NextResidual(OpKernelContext* ctx, int input, int64_t elements, const float** now, float** next) {
    const TensorShape& shape = ctx->input(input).shape();
    TF_RETURN_IF_ERROR(CheckResidualShape(shape, elements, /*required=*/false));
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(ctx->forward_input_or_allocate_output({input}, input, shape, &output));
    if (shape.num_elements() == 0) return absl::OkStatus();
    *now = ctx->input(input).flat<float>().data();
    *next = output->flat<float>().data();
    return absl::OkStatus();
  }

  Outcome Open(OpKernelContext* ctx, CodedExchange& exchange, Variables& variables) const {
    const int64_t owned =
        std::clamp<int64_t>(exchange.total - call_.place * exchange.shard, 0, exchange.shard);
    Residual worker, owner;
    absl::Status opened = variables.worker.emplace().Open(ctx, tensors_, exchange.total, &worker);
    if (opened.ok()) opened = variables.owner.emplace().Open(ctx, tensors_ + 1, owned, &owner);
    if (!opened.ok()) {
      const bool exhausted = absl::IsResourceExhausted(opened);
      return {exhausted ? Outcome::kExhausted : Outcome::kRefused, std::string(opened.message())};
    }
    exchange.worker_residual = worker.old_values;
    exchange.new_worker_residual = worker.new_values;
    exchange.owner_residual = owner.old_values;
    exchange.new_owner_residual = owner.new_values;
    return {};
  }

  int64_t mesh_ = 0;
  tfpar_codec codec_{};
  int tensors_ = 0;
  Call call_;
};

REGISTER_KERNEL_BUILDER(Name("TfparExchange").Device(::tensorflow::DEVICE_CPU), ExchangeKernel<false>);
REGISTER_KERNEL_BUILDER(Name("TfparExchangeResource").Device(::tensorflow::DEVICE_CPU), ExchangeKernel<true>);

}  // namespace
}  // namespace tfpar
