// The calls of a mesh as operations. They take no thread of TensorFlow while they wait.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tfpar_ops/transport/started_call.h"

namespace tfpar {
namespace {

using ::tensorflow::AsyncOpKernel;
using ::tensorflow::DataType;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

#define TFPAR_NUMBERS "{half, bfloat16, float, double, int32, int64}"
absl::Status Unchanged(InferenceContext* c) {
  c->set_output(0, c->input(0));
  return absl::OkStatus();
}

absl::Status Members(InferenceContext* c, int64_t* size) {
  std::vector<int64_t> members;
  TF_RETURN_IF_ERROR(c->GetAttr("members", &members));
  *size = static_cast<int64_t>(members.size());
  return absl::OkStatus();
}

// [from, ...] to [to, ...], where 0 stands for the number of members.
absl::Status Rows(InferenceContext* c, int64_t from, int64_t to) {
  int64_t size;
  TF_RETURN_IF_ERROR(Members(c, &size));
  ShapeHandle rows;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &rows));
  DimensionHandle dim;
  TF_RETURN_IF_ERROR(c->WithValue(c->Dim(rows, 0), from ? from : size, &dim));
  ShapeHandle output;
  TF_RETURN_IF_ERROR(c->ReplaceDim(rows, 0, c->MakeDim(to ? to : size), &output));
  c->set_output(0, output);
  return absl::OkStatus();
}

// The number of rows of a member's share.
int64_t ShareOf(int64_t rows, int64_t members) { return (rows + members - 1) / members; }

absl::Status Share(InferenceContext* c) {
  int64_t size;
  TF_RETURN_IF_ERROR(Members(c, &size));
  ShapeHandle rows;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &rows));
  const DimensionHandle dim = c->Dim(rows, 0);
  ShapeHandle output;
  TF_RETURN_IF_ERROR(c->ReplaceDim(
      rows, 0, c->ValueKnown(dim) ? c->MakeDim(ShareOf(c->Value(dim), size)) : c->UnknownDim(), &output));
  c->set_output(0, output);
  return absl::OkStatus();
}

REGISTER_OP("TfparAllReduce")
    .Input("value: T")
    .Input("instance: int32")
    .Output("sum: T")
    .Attr("T: " TFPAR_NUMBERS)
    .TFPAR_GROUP_ATTRS.SetIsStateful()
    .SetShapeFn(Unchanged)
    .Doc("The sum over the members, in their order: the same bits on each.");

REGISTER_OP("TfparReduceScatter")
    .Input("rows: T")
    .Input("instance: int32")
    .Output("sum: T")
    .Attr("T: " TFPAR_NUMBERS)
    .TFPAR_GROUP_ATTRS.SetIsStateful()
    .SetShapeFn(Share)
    .Doc("[n, ...] to [n / members, rounded up, ...]: the sum over the members of the rows of this member's share. Shares are "
         "in the order of the members; zeros fill those that exceed the n rows.");

REGISTER_OP("TfparAllToAll")
    .Input("rows: T")
    .Input("instance: int32")
    .Output("received: T")
    .Attr("T: type")
    .TFPAR_GROUP_ATTRS.SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return Rows(c, 0, 0); })
    .Doc("Sends row i to member i; row i of the result came from member i.");

REGISTER_OP("TfparAllGather")
    .Input("row: T")
    .Input("instance: int32")
    .Output("rows: T")
    .Attr("T: type")
    .TFPAR_GROUP_ATTRS.SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return Rows(c, 1, 0); })
    .Doc("The members' rows in their order: [1, ...] to [members, ...].");

REGISTER_OP("TfparBroadcast")
    .Input("value: T")
    .Input("instance: int32")
    .Output("received: T")
    .Attr("T: type")
    .Attr("peer: int >= 0")
    .TFPAR_GROUP_ATTRS.SetIsStateful()
    .SetShapeFn(Unchanged)
    .Doc("The value of member `peer`; all members' have one shape.");

REGISTER_OP("TfparSend")
    .Input("value: T")
    .Input("instance: int32")
    .Output("sent: T")
    .Attr("T: type")
    .Attr("peer: int >= 0")
    .TFPAR_GROUP_ATTRS.SetIsStateful()
    .SetShapeFn(Unchanged)
    .Doc("Sends to member `peer`. The result is the value, once it has left.");

REGISTER_OP("TfparReceive")
    .Input("instance: int32")
    .Output("received: T")
    .Attr("T: type")
    .Attr("shape: shape")
    .Attr("peer: int >= 0")
    .TFPAR_GROUP_ATTRS.SetIsStateful()
    .SetShapeFn(::tensorflow::shape_inference::ExplicitShape)
    .Doc("What member `peer` sends, of a shape and type that both know.");

REGISTER_OP("TfparBarrier")
    .Input("instance: int32")
    .Output("members_there: int32")
    .TFPAR_GROUP_ATTRS.SetIsStateful()
    .SetShapeFn(::tensorflow::shape_inference::ScalarShape)
    .Doc("Waits for all members, and returns their number.");

// Sums of each type round once per addition.
template <typename T>
void Add(void* sum, const void* x, size_t n) {
  T* to = static_cast<T*>(sum);
  const T* from = static_cast<const T*>(x);
  for (size_t i = 0; i < n; ++i) to[i] = static_cast<T>(to[i] + from[i]);
}

AddFunction AddOf(DataType type) {
  switch (type) {
    case ::tensorflow::DT_HALF:
      return Add<Eigen::half>;
    case ::tensorflow::DT_BFLOAT16:
      return Add<Eigen::bfloat16>;
    case ::tensorflow::DT_FLOAT:
      return Add<float>;
    case ::tensorflow::DT_DOUBLE:
      return Add<double>;
    case ::tensorflow::DT_INT32:
      return Add<int32_t>;
    case ::tensorflow::DT_INT64:
      return Add<int64_t>;
    default:
      return nullptr;
  }
}

template <Collective kCollective>
class CollectiveKernel : public AsyncOpKernel {
 public:
  explicit CollectiveKernel(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadGroup(ctx, &mesh_, &call_));
    if (kCollective == Collective::kReceive) OP_REQUIRES_OK(ctx, ctx->GetAttr("shape", &shape_));
    type_ = ctx->output_type(0);
    OP_REQUIRES(ctx, ::tensorflow::DataTypeCanUseMemcpy(type_),
                absl::InvalidArgumentError("T: elements of this type are not plain bytes"));
    call_.collective = kCollective;
    call_.add = AddOf(type_);
    call_.element_bytes = ::tensorflow::DataTypeSize(type_);
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    Call call = call_;
    const absl::Status prepared = Prepare(ctx, call);
    StartCall(ctx, mesh_, prepared, std::move(call), std::move(done));
  }

 private:
  // Finds input and output of a call. The context keeps both until `done`.
  absl::Status Prepare(OpKernelContext* ctx, Call& call) {
    TF_RETURN_IF_ERROR(ReadInstance(ctx, &call));
    if (kCollective == Collective::kBarrier) {
      Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &output));
      output->scalar<int32_t>()() = static_cast<int32_t>(call.members.size());
      return absl::OkStatus();
    }
    Tensor* output = nullptr;
    if (kCollective == Collective::kReceive) {
      TF_RETURN_IF_ERROR(ctx->allocate_output(0, shape_, &output));
    } else if (kCollective == Collective::kSend) {
      ctx->set_output(0, ctx->input(0));
    } else if (kCollective == Collective::kAllReduce || kCollective == Collective::kBroadcast) {
      TF_RETURN_IF_ERROR(ctx->forward_input_or_allocate_output({0}, 0, ctx->input(0).shape(), &output));
    } else {
      TF_RETURN_IF_ERROR(AllocateRows(ctx, static_cast<int64_t>(call.members.size()), &output));
    }
    if (kCollective != Collective::kReceive) {
      call.in = ctx->input(0).data();
      call.bytes = ctx->input(0).NumElements() * call.element_bytes;
    } else {
      call.bytes = output->NumElements() * call.element_bytes;
    }
    if (output != nullptr) call.out = output->data();
    if (kCollective == Collective::kAllToAll) call.bytes /= call.members.size();
    if (kCollective == Collective::kReduceScatter) {
      call.in_bytes = call.bytes;
      call.bytes = output->NumElements() * call.element_bytes;
    }
    return absl::OkStatus();
  }

  static absl::Status AllocateRows(OpKernelContext* ctx, int64_t members, Tensor** output) {
    const bool scatters = kCollective == Collective::kReduceScatter;
    const int64_t rows = kCollective == Collective::kAllGather ? 1 : members;
    TensorShape shape = ctx->input(0).shape();
    if (shape.dims() < 1 || (!scatters && shape.dim_size(0) != rows)) {
      return absl::InvalidArgumentError("the first dimension of the input, " + shape.DebugString() + ", must be " +
                                        (scatters ? "there" : std::to_string(rows)));
    }
    shape.set_dim(0, scatters ? ShareOf(shape.dim_size(0), members) : members);
    return ctx->allocate_output(0, shape, output);
  }

  int64_t mesh_ = 0;
  TensorShape shape_;
  DataType type_;
  Call call_;
};

#define TFPAR_REGISTER(name, collective)                                              \
  REGISTER_KERNEL_BUILDER(Name(name).Device(::tensorflow::DEVICE_CPU),                 \
                          CollectiveKernel<Collective::collective>)
TFPAR_REGISTER("TfparAllReduce", kAllReduce);
TFPAR_REGISTER("TfparReduceScatter", kReduceScatter);
TFPAR_REGISTER("TfparAllToAll", kAllToAll);
TFPAR_REGISTER("TfparAllGather", kAllGather);
TFPAR_REGISTER("TfparBroadcast", kBroadcast);
TFPAR_REGISTER("TfparSend", kSend);
TFPAR_REGISTER("TfparReceive", kReceive);
TFPAR_REGISTER("TfparBarrier", kBarrier);

}  // namespace
}  // namespace tfpar
