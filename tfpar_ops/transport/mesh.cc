#include "tfpar_ops/transport/mesh.h"

#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <utility>

#include "tfpar_ops/transport/adopted_pairs.h"
#include "tfpar_ops/transport/running_call.h"

namespace tfpar {
namespace {

// Calls have keys without this bit (RunningCall::Slot).
constexpr uint64_t kWatchSlot = ~uint64_t{0};

}  // namespace

std::string WithoutPlace(const std::string& message) {
  const size_t end = message.find("] ");
  return message.empty() || message[0] != '[' || end == std::string::npos ? message : message.substr(end + 2);
}

Mesh::Mesh(int rank, std::vector<std::string> names, const std::string& host, const std::string& token,
           std::chrono::milliseconds timeout)
    : rank_(rank),
      names_(std::move(names)),
      timeout_(timeout),
      place_{rank, size(), token},
      listener_(std::make_unique<PeerListener>(place_, host)),
      lost_(names_.size()) {}

Mesh::~Mesh() {
  Abort(Outcome::kCancelled, "the transport was closed");
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    if (watched_) watched_->abortWaitRecv();
  }
  if (watcher_.joinable()) watcher_.join();
}

void Mesh::Connect(const std::vector<std::string>& addresses) {
  const Deadline deadline = std::chrono::steady_clock::now() + timeout_;
  std::vector<int> connections(size(), -1);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    try {
      connections[peer] = peer < rank_ ? ConnectToPeer(place_, peer, addresses.at(peer), deadline)
                                       : listener_->WaitForPeer(peer, deadline);
    } catch (const std::exception& error) {
      for (const int connection : connections) {
        if (connection >= 0) close(connection);
      }
      throw std::runtime_error(names_[peer] + ": " + error.what());
    }
  }
  const std::string host = listener_->host();
  listener_->Close();
  dropped_ = listener_->dropped();
  listener_.reset();
  context_ = Adopt(rank_, std::move(connections), host, kForever);
  if (size() > 1) watcher_ = std::thread([this] { Watch(); });
}

void Mesh::Watch() {
  // Gloo reports a lost peer only to receives that wait for a message from it. This receive never completes, so the loss is
  // noticed at once, also by calls that wait for another worker, which may itself be waiting for the lost one.
  char nothing;
  while (true) {
    gloo::transport::UnboundBuffer* buffer;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (closing_) return;
      watched_ = context_->createUnboundBuffer(&nothing, sizeof(nothing));
      buffer = watched_.get();
    }
    bool found = false, watching = false;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank_ || !lost_[peer].empty()) continue;  // this thread alone changes lost_
      try {
        buffer->recv(peer, kWatchSlot);
        watching = true;
      } catch (const std::exception& error) {
        std::lock_guard<std::mutex> lock(mutex_);
        lost_[peer] = WithoutPlace(error.what());
        losses_.push_back(peer);
        found = true;
      }
    }
    if (found) WakeAll();
    if (!watching) return;
    try {
      if (!buffer->waitRecv(nullptr, kForever)) continue;
    } catch (const std::exception&) {  // the next iteration finds out which connection it is
    }
  }
}

void Mesh::WakeAll() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (RunningCall* call : running_) call->Wake();
}

void Mesh::Start(Call call) {
  auto kept = std::make_shared<Call>(std::move(call));
  if (kept->coded) kept->turn = turns_.NextNumber();
  const std::string problem = threads_.Run([this, kept] {
    const Outcome outcome = Execute(*kept);
    const auto done = std::move(kept->done);
    done(outcome);
  });
  if (problem.empty()) return;
  // The other members are in the middle of this call, so all later ones fail too.
  const Outcome outcome{Outcome::kLost, "this worker has no thread for a call: " + problem};
  Abort(outcome.kind, outcome.message);
  kept->done(outcome);
}

Outcome Mesh::Execute(Call& call) {
  const Outcome outcome = Attempt(call);
  // The others wait for this worker's part of the call. A later call with the same key would be taken for it.
  if (outcome.kind != Outcome::kDone) Abort(outcome.kind, outcome.message);
  return outcome;
}

Outcome Mesh::Attempt(Call& call) {
  try {
    if (call.prepare) {
      const Outcome prepared = call.prepare();
      if (prepared.kind != Outcome::kDone) return prepared;
    }
    RunningCall running(*this, call);
    running.Run();
    return {};
  } catch (const CallEnded& ended) {
    return ended.outcome;
  } catch (const std::bad_alloc&) {
    return {Outcome::kLost, "this worker has no memory for a call"};
  } catch (const std::exception& error) {
    return {Outcome::kLost, WithoutPlace(error.what())};
  }
}

void Mesh::Abort(Outcome::Kind kind, const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.kind == Outcome::kDone) failure_ = {kind, reason};
  }
  WakeAll();
}

int64_t Mesh::WaitingMs() const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  int64_t longest = 0;
  for (const RunningCall* call : running_) {
    longest = std::max<int64_t>(
        longest, std::chrono::duration_cast<std::chrono::milliseconds>(now - call->began()).count());
  }
  return longest;
}

}  // namespace tfpar
