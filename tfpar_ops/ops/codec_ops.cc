// Registers the operations: their inputs, outputs, attributes and shapes. FORMAT.md specifies the payload formats.
#include <cstdint>
#include <vector>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tfpar_ops/ops/codec_attrs.h"

namespace tfpar {
namespace {

using ::tensorflow::PartialTensorShape;
using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

// The number of inputs in the list `tensors`, which comes first.
int Tensors(InferenceContext* c) {
  int count = 0;
  c->GetAttr("N", &count).IgnoreError();  // the operation has this attribute
  return count;
}

// Sets `total` to the number of elements of the first `count` inputs together, or to -1 if a shape is unknown.
absl::Status TotalElements(InferenceContext* c, int count, int64_t* total) {
  *total = 0;
  for (int i = 0; i < count; ++i) {
    const DimensionHandle elements = c->NumElements(c->input(i));
    if (!c->ValueKnown(elements)) {
      *total = -1;
      return absl::OkStatus();
    }
    TF_RETURN_IF_ERROR(AddElements(c->Value(elements), total));
  }
  return absl::OkStatus();
}

absl::Status CheckVector(InferenceContext* c, int input, int64_t length) {
  ShapeHandle vector;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(input), 1, &vector));
  DimensionHandle dim;
  return c->WithValue(c->Dim(vector, 0), length, &dim);
}

absl::Status CheckScalar(InferenceContext* c, int input) {
  ShapeHandle scalar;
  return c->WithRank(c->input(input), 0, &scalar);
}

// A residual has one element per encoded element, or none at all. `elements` is -1 if it is unknown.
absl::Status CheckResidual(InferenceContext* c, ShapeHandle shape, int64_t elements, bool required) {
  ShapeHandle vector;
  TF_RETURN_IF_ERROR(c->WithRank(shape, 1, &vector));
  const DimensionHandle dim = c->Dim(vector, 0);
  if (elements < 0 || !c->ValueKnown(dim)) return absl::OkStatus();
  const int64_t length = c->Value(dim);
  if (length == elements || (length == 0 && !required)) return absl::OkStatus();
  return Invalid("residual: ", length, " elements, expected ", elements, required ? "" : " (or none)");
}

absl::Status CheckResidualVariable(InferenceContext* c, int input, int64_t elements) {
  TF_RETURN_IF_ERROR(CheckScalar(c, input));
  const auto* handle = c->input_handle_shapes_and_types(input);
  if (handle == nullptr || handle->size() != 1) return absl::OkStatus();
  if (handle->at(0).dtype != tensorflow::DT_FLOAT && handle->at(0).dtype != tensorflow::DT_INVALID) {
    return Invalid("residual: a variable of ", tensorflow::DataTypeString(handle->at(0).dtype), ", expected float32");
  }
  return CheckResidual(c, handle->at(0).shape, elements, /*required=*/true);
}

absl::Status EncodeShape(InferenceContext* c) {
  tfpar_codec codec;
  TF_RETURN_IF_ERROR(ReadCodec(c, &codec));
  int64_t count, requested;
  TF_RETURN_IF_ERROR(c->GetAttr("shards", &count));
  TF_RETURN_IF_ERROR(c->GetAttr("shard_elements", &requested));
  const int tensors = Tensors(c);
  int64_t total;
  TF_RETURN_IF_ERROR(TotalElements(c, tensors, &total));
  TF_RETURN_IF_ERROR(CheckVector(c, tensors + 1, 2));
  TF_RETURN_IF_ERROR(CheckScalar(c, tensors + 2));
  Shards shards;
  DimensionHandle words = c->UnknownDim();
  if (total >= 0) {
    TF_RETURN_IF_ERROR(MakeShards(codec, total, count, requested, &shards));
    words = c->MakeDim(shards.words);
  } else if (requested > 0) {
    TF_RETURN_IF_ERROR(PayloadWords(codec, requested, &shards.words));
    words = c->MakeDim(shards.words);
  }
  c->set_output(0, c->Matrix(c->MakeDim(count), words));
  if (c->num_outputs() == 2) {  // the residual is a variable
    TF_RETURN_IF_ERROR(CheckResidualVariable(c, tensors, total));
    c->set_output(1, c->Vector(2));
    return absl::OkStatus();
  }
  TF_RETURN_IF_ERROR(CheckResidual(c, c->input(tensors), total, /*required=*/false));
  c->set_output(1, c->input(tensors));
  c->set_output(2, c->Vector(2));
  return absl::OkStatus();
}

// Checks that payloads are rows of as many words as `elements` elements need.
absl::Status CheckPayloads(InferenceContext* c, const tfpar_codec& codec, int64_t elements) {
  ShapeHandle payloads;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &payloads));
  int64_t words = 0;
  TF_RETURN_IF_ERROR(PayloadWords(codec, elements, &words));
  const DimensionHandle dim = c->Dim(payloads, 1);
  if (c->ValueKnown(dim) && c->Value(dim) != words) {
    return Invalid("payloads: rows of ", c->Value(dim), " words, expected ", words, " for ", elements, " elements");
  }
  return absl::OkStatus();
}

absl::Status DecodeShape(InferenceContext* c) {
  tfpar_codec codec;
  TF_RETURN_IF_ERROR(ReadCodec(c, &codec));
  std::vector<PartialTensorShape> shapes;
  int64_t requested;
  TF_RETURN_IF_ERROR(c->GetAttr("shapes", &shapes));
  TF_RETURN_IF_ERROR(c->GetAttr("shard_elements", &requested));
  TF_RETURN_IF_ERROR(CheckScalar(c, 1));
  if (static_cast<int64_t>(shapes.size()) != c->num_outputs()) {
    return Invalid("shapes: ", shapes.size(), " of them for ", c->num_outputs(), " outputs");
  }
  int64_t total = 0;
  for (int i = 0; i < c->num_outputs(); ++i) {
    if (!shapes[i].IsFullyDefined()) {
      return Invalid("shapes[", i, "]=", shapes[i].DebugString(), " is not fully defined");
    }
    TF_RETURN_IF_ERROR(AddElements(shapes[i].num_elements(), &total));
    ShapeHandle output;
    TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shapes[i], &output));
    c->set_output(i, output);
  }
  ShapeHandle payloads;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &payloads));
  const DimensionHandle count = c->Dim(payloads, 0);
  if (!c->ValueKnown(count)) return absl::OkStatus();
  Shards shards;
  TF_RETURN_IF_ERROR(MakeShards(codec, total, c->Value(count), requested, &shards));
  return CheckPayloads(c, codec, shards.elements);
}

absl::Status DecodeSumShape(InferenceContext* c) {
  tfpar_codec codec;
  TF_RETURN_IF_ERROR(ReadCodec(c, &codec));
  int64_t elements;
  TF_RETURN_IF_ERROR(c->GetAttr("elements", &elements));
  TF_RETURN_IF_ERROR(CheckPayloads(c, codec, elements));
  TF_RETURN_IF_ERROR(CheckScalar(c, 1));
  c->set_output(0, c->Vector(elements));
  return absl::OkStatus();
}

absl::Status RecodeShape(InferenceContext* c) {
  tfpar_codec codec;
  TF_RETURN_IF_ERROR(ReadCodec(c, &codec));
  int64_t elements, valid, words = 0;
  TF_RETURN_IF_ERROR(c->GetAttr("elements", &elements));
  TF_RETURN_IF_ERROR(c->GetAttr("valid", &valid));
  if (valid > elements) {
    return Invalid("valid=", valid, " is more than elements=", elements);
  }
  TF_RETURN_IF_ERROR(CheckPayloads(c, codec, elements));
  TF_RETURN_IF_ERROR(CheckScalar(c, 1));
  TF_RETURN_IF_ERROR(CheckScalar(c, 3));
  TF_RETURN_IF_ERROR(CheckVector(c, 4, 2));
  TF_RETURN_IF_ERROR(CheckScalar(c, 5));
  TF_RETURN_IF_ERROR(PayloadWords(codec, elements, &words));
  c->set_output(0, c->Matrix(1, words));
  if (c->num_outputs() == 2) {  // the residual is a variable
    TF_RETURN_IF_ERROR(CheckResidualVariable(c, 2, valid));
    c->set_output(1, c->Vector(2));
    return absl::OkStatus();
  }
  TF_RETURN_IF_ERROR(CheckResidual(c, c->input(2), valid, /*required=*/false));
  c->set_output(1, c->input(2));
  c->set_output(2, c->Vector(2));
  return absl::OkStatus();
}

absl::Status NormSquaredShape(InferenceContext* c) {
  c->set_output(0, c->Scalar());
  c->set_output(1, c->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("TfparEncode")
    .Input("tensors: N * float")
    .Input("residual: float")
    .Input("seed_step: int64")
    .Input("measures_norms: bool")
    .Output("payload: int32")
    .Output("new_residual: float")
    .Output("norms: float")
    .Attr("N: int >= 1")
    .TFPAR_CODEC_ATTRS.Attr("shards: int >= 1 = 1")
    .Attr("shard_elements: int >= 0 = 0")
    .SetShapeFn(EncodeShape)
    .Doc(R"doc(
Encodes tensors, seen as one vector of L elements, and returns the rest, which the payload does not hold, as residual.

tensors: Gradients, which are read in place and in order.
residual: [L], added before encoding; [0] for none.
seed_step: [2], in host memory: key and step of the random numbers for stochastic rounding.
measures_norms: Scalar in host memory.
payload: [shards, words], one payload per shard.
new_residual: Same shape as `residual`; reuses its buffer where possible.
norms: [2], the sums of squares of `tensors` and of `new_residual`; NaN if not `measures_norms`.
shard_elements: Elements per shard; the last shards are padded. 0 for the fewest whole blocks (one shard: L elements).
)doc");

// Stateful, like all operations on resources, so that TensorFlow neither prunes it nor merges it with another one that
// has the same inputs.
REGISTER_OP("TfparEncodeResource")
    .Input("tensors: N * float")
    .Input("residual: resource")
    .Input("seed_step: int64")
    .Input("measures_norms: bool")
    .Output("payload: int32")
    .Output("norms: float")
    .Attr("N: int >= 1")
    .TFPAR_CODEC_ATTRS.Attr("shards: int >= 1 = 1")
    .Attr("shard_elements: int >= 0 = 0")
    .SetIsStateful()
    .SetShapeFn(EncodeShape)
    .Doc("Like TfparEncode, but the residual is a float32 variable of L elements, which is updated in place.");

REGISTER_OP("TfparDecode")
    .Input("payloads: int32")
    .Input("factor: float")
    .Output("tensors: N * float")
    .Attr("N: int >= 1")
    .Attr("shapes: list(shape)")
    .TFPAR_CODEC_ATTRS.Attr("shard_elements: int >= 0 = 0")
    .SetShapeFn(DecodeShape)
    .Doc(R"doc(
Decodes the shards of one vector into tensors.

payloads: [shards, words], the output of TfparEncode.
factor: Scalar that every element is multiplied by; 1 leaves the elements unchanged.
tensors: The elements of the vector, in order.
)doc");

REGISTER_OP("TfparDecodeSum")
    .Input("payloads: int32")
    .Input("factor: float")
    .Output("sum: float")
    .TFPAR_CODEC_ATTRS.Attr("elements: int >= 0")
    .SetShapeFn(DecodeSumShape)
    .Doc(R"doc(
Decodes the payloads of peers and sums them in the order of the rows.

payloads: [peers, words].
factor: Scalar that the sum is multiplied by; 1 leaves the sum unchanged.
sum: [elements].
)doc");

REGISTER_OP("TfparRecode")
    .Input("payloads: int32")
    .Input("factor: float")
    .Input("residual: float")
    .Input("begin: int64")
    .Input("seed_step: int64")
    .Input("measures_norms: bool")
    .Output("payload: int32")
    .Output("new_residual: float")
    .Output("norms: float")
    .TFPAR_CODEC_ATTRS.Attr("elements: int >= 0")
    .Attr("valid: int >= 0")
    .SetShapeFn(RecodeShape)
    .Doc(R"doc(
Decodes and sums the payloads of peers, adds the residual of the shard's owner and encodes again, in one pass.

payloads: [peers, words].
factor: Scalar that the sum is multiplied by; 1 leaves the sum unchanged.
residual: [valid]; [0] for none.
begin: Scalar in host memory: index of the shard's first element in the whole vector, a multiple of the block size.
seed_step: [2], as for TfparEncode.
measures_norms: Scalar, as for TfparEncode.
payload: [1, words].
new_residual: Same shape as `residual`; reuses its buffer where possible.
norms: [2], the sums of squares of the scaled sum and of `new_residual`; NaN if not `measures_norms`.
elements: Number of elements in the shard, padding included.
valid: Number of elements in the shard that are not padding.
)doc");

REGISTER_OP("TfparRecodeResource")
    .Input("payloads: int32")
    .Input("factor: float")
    .Input("residual: resource")
    .Input("begin: int64")
    .Input("seed_step: int64")
    .Input("measures_norms: bool")
    .Output("payload: int32")
    .Output("norms: float")
    .TFPAR_CODEC_ATTRS.Attr("elements: int >= 0")
    .Attr("valid: int >= 0")
    .SetIsStateful()
    .SetShapeFn(RecodeShape)
    .Doc("Like TfparRecode, but the residual is a float32 variable of `valid` elements, which is updated in place.");

REGISTER_OP("TfparNormSquared")
    .Input("tensors: N * float")
    .Output("norm_squared: float")
    .Output("finite: bool")
    .Attr("N: int >= 1")
    .SetShapeFn(NormSquaredShape)
    .Doc(R"doc(
Sum of squares of all elements, in an order that does not depend on the number of threads.

norm_squared: Scalar; infinite if the sum overflows float32.
finite: Scalar; whether every element is finite, even if norm_squared is infinite.
)doc");

}  // namespace
}  // namespace tfpar
