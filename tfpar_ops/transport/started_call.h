// Common parts of the operations of a mesh: their attributes, and how they start and end a call.
#ifndef TFPAR_OPS_TRANSPORT_STARTED_CALL_H_
#define TFPAR_OPS_TRANSPORT_STARTED_CALL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tfpar_ops/transport/registry.h"

// The mesh, the group and its members. `instance` and `group` distinguish the messages of a call from those of others.
#define TFPAR_GROUP_ATTRS Attr("mesh: int").Attr("group: int").Attr("members: list(int) >= 1").Attr("place: int >= 0")

namespace tfpar {

// Reads these attributes, and `peer` if the operation has it.
inline absl::Status ReadGroup(::tensorflow::OpKernelConstruction* ctx, int64_t* mesh, Call* call) {
  int64_t group;
  std::vector<int64_t> members;
  TF_RETURN_IF_ERROR(ctx->GetAttr("mesh", mesh));
  TF_RETURN_IF_ERROR(ctx->GetAttr("group", &group));
  TF_RETURN_IF_ERROR(ctx->GetAttr("members", &members));
  TF_RETURN_IF_ERROR(ctx->GetAttr("place", &call->place));
  if (ctx->HasAttr("peer")) TF_RETURN_IF_ERROR(ctx->GetAttr("peer", &call->peer));
  const int size = static_cast<int>(members.size());
  if (call->place >= size || call->peer >= size) {
    return absl::InvalidArgumentError("place and peer must be smaller than the number of members");
  }
  call->members.assign(members.begin(), members.end());
  call->key = static_cast<uint64_t>(group) << 32;
  return absl::OkStatus();
}

// The last input is the instance.
inline absl::Status ReadInstance(::tensorflow::OpKernelContext* ctx, Call* call) {
  const ::tensorflow::Tensor& instance = ctx->input(ctx->num_inputs() - 1);
  if (instance.NumElements() != 1) return absl::InvalidArgumentError("instance: not a scalar");
  call->key |= static_cast<uint32_t>(instance.flat<int32_t>()(0));
  return absl::OkStatus();
}

// The error of an operation. Only that of a lost worker has the words of TensorFlow's own collectives, by which
// tfpar/cluster/failure.py knows it, as it knows the others by theirs.
inline absl::Status StatusOf(const Outcome& outcome) {
  const std::string own = "this worker's part of a collective call failed: " + outcome.message;
  switch (outcome.kind) {
    case Outcome::kDone:
      return absl::OkStatus();
    case Outcome::kLost:
      return absl::UnavailableError("Collective call: " + outcome.message);
    case Outcome::kCancelled:
      return absl::CancelledError(own);
    case Outcome::kRefused:
      return absl::FailedPreconditionError(own);
    case Outcome::kExhausted:
      return absl::ResourceExhaustedError(own);
    case Outcome::kFailed:
      return absl::InternalError(own);
  }
}

// Starts a call; the operation ends after the call's own `done`, if it has one.
//   prepared: of what the operation did before. An error ends the operation, and all calls of the mesh: the other members wait
//     for this one.
inline void StartCall(::tensorflow::OpKernelContext* ctx, int64_t number, absl::Status prepared, Call call,
                      ::tensorflow::AsyncOpKernel::DoneCallback done) {
  const std::shared_ptr<Mesh> mesh = FindMesh(number);
  OP_REQUIRES_ASYNC(ctx, mesh != nullptr, absl::FailedPreconditionError("the transport of this process is closed"), done);
  if (prepared.ok()) {
    const std::string problem = mesh->Problem(call);
    if (!problem.empty()) prepared = absl::InvalidArgumentError(problem);
  }
  if (!prepared.ok()) mesh->Abort(Outcome::kRefused, std::string(prepared.message()));
  OP_REQUIRES_OK_ASYNC(ctx, prepared, done);
  // Cancelling a call leaves the other members in the middle of it, or waiting for it to begin: as in TensorFlow's runtime, all
  // later calls fail too.
  auto* manager = ctx->cancellation_manager();
  ::tensorflow::CancellationToken token = 0;
  if (manager != nullptr) {
    token = manager->get_cancellation_token();
    static constexpr char kReason[] = "another operation of this worker failed during a collective call";
    const bool registered = manager->RegisterCallback(token, [mesh = std::weak_ptr<Mesh>(mesh)] {
      const std::shared_ptr<Mesh> known = mesh.lock();
      if (known) known->Abort(Outcome::kCancelled, kReason);
    });
    if (!registered) mesh->Abort(Outcome::kCancelled, kReason);
    OP_REQUIRES_ASYNC(ctx, registered, absl::CancelledError("cancelled before it began"), done);
  }
  call.done = [ctx, own = std::move(call.done), done = std::move(done), manager, token](const Outcome& outcome) {
    if (manager != nullptr) manager->DeregisterCallback(token);
    if (own) own(outcome);
    if (outcome.kind != Outcome::kDone) ctx->SetStatus(StatusOf(outcome));
    done();
  };
  mesh->Start(std::move(call));
}

}  // namespace tfpar

#endif  // TFPAR_OPS_TRANSPORT_STARTED_CALL_H_
