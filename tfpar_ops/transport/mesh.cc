#include "tfpar_ops/transport/mesh.h"

#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "tfpar_ops/transport/adopted_pairs.h"
#include "tfpar_ops/transport/running_call.h"
#include "tfpar_ops/transport/sigpipe.h"

namespace tfpar {
namespace {

// Calls have keys without the highest bit (RunningCall::Slot).
constexpr uint64_t kWatchSlot = ~uint64_t{0};
constexpr uint64_t kFarewellSlot = kWatchSlot - 1;
// Only a peer that does not read, or to which the rest of a message of a call that has ended is to be sent, takes that long.
constexpr std::chrono::milliseconds kFarewellTimeout{1000};

// The text up to a number of bytes, without a part of a UTF-8 character.
std::string Shortened(const std::string& text, size_t bytes) {
  if (text.size() <= bytes) return text;
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xc0) == 0x80) --bytes;
  return text.substr(0, bytes);
}

}  // namespace

std::string WithoutPlace(const std::string& message) {
  const size_t end = message.find("] ");
  return message.empty() || message[0] != '[' || end == std::string::npos ? message : message.substr(end + 2);
}

Mesh::Mesh(int rank, std::vector<std::string> names, const std::string& host, const std::string& token,
           std::chrono::milliseconds timeout, std::chrono::milliseconds silence)
    : rank_(rank),
      names_(std::move(names)),
      timeout_(timeout),
      silence_(silence),
      place_{rank, size(), token},
      listener_(std::make_unique<PeerListener>(place_, host)),
      lost_(names_.size()) {}

Mesh::~Mesh() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = failure_.kind == Outcome::kDone;
    if (closing_) failure_ = {Outcome::kCancelled, "the transport was closed"};
  }
  WakeAll();
  if (watcher_.joinable()) watcher_.join();
}

void Mesh::Connect(const std::vector<std::string>& addresses) {
  if (!listener_) throw std::runtime_error("the transport has stopped listening: a mesh connects once");
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
  context_ = Adopt(rank_, std::move(connections), host, kForever, silence_);
  if (size() > 1) {
    farewells_.resize(size());
    watching_ = true;
    const BlockedSigpipe blocked;
    watcher_ = std::thread([this] { Watch(); });
  }
  connected_ = true;
}

void Mesh::Watch() {
  // Gloo reports a lost peer only to receives that wait for a message from it. This receive never completes, so the loss is
  // noticed at once, also by calls that wait for another worker, which may itself be waiting for the lost one.
  ReceiveFarewells();
  while (NoticeLosses()) {
    try {
      watched_->waitRecv(nullptr, kForever);
    } catch (const std::exception&) {  // NoticeLosses finds out which connection it is
    }
  }
  std::unique_lock<std::mutex> lock(mutex_);
  if (failure_.kind != Outcome::kDone && !closing_) {
    const Outcome failure = failure_;
    lock.unlock();
    Disconnect(failure);
    lock.lock();
  }
  watching_ = false;
  watched_last_.notify_all();
}

void Mesh::ReceiveFarewells() {
  receives_farewells_ = context_->createUnboundBuffer(farewells_.data(), farewells_.size() * sizeof(Farewell));
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    try {
      receives_farewells_->recv(peer, kFarewellSlot, peer * sizeof(Farewell), sizeof(Farewell));
    } catch (const std::exception&) {  // lost already: NoticeLosses finds out
    }
  }
}

// Waits for all peers from now on, and notes those that are lost. Returns whether there is one to wait for.
bool Mesh::NoticeLosses() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.kind != Outcome::kDone) return false;
    watched_ = context_->createUnboundBuffer(&watched_byte_, sizeof(watched_byte_));
  }
  bool found = false, watching = false;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_ || !lost_[peer].empty()) continue;  // this thread alone changes lost_
    try {
      watched_->recv(peer, kWatchSlot);
      watching = true;
    } catch (const std::exception& error) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (failure_.kind != Outcome::kDone) return false;  // which may have closed the connection
      lost_[peer] = TextOfLoss(peer, error.what());
      losses_.push_back(peer);
      found = true;
    }
  }
  if (found) WakeAll();
  return watching;
}

// What a worker has sent before it closed the connection, or the error that ended it.
std::string Mesh::TextOfLoss(int rank, const std::string& error) const {
  const Farewell& farewell = farewells_[rank];
  return farewell.complete ? farewell.text : "lost " + names_[rank] + ": " + WithoutPlace(error);
}

// Sends the cause of a failure to all peers, and closes the connections.
void Mesh::Disconnect(const Outcome& failure) {
  Farewell farewell;
  const bool lost = failure.kind == Outcome::kLost;
  const std::string text =
      Shortened(lost ? failure.message : names_[rank_] + " failed: " + failure.message, sizeof(farewell.text) - 1);
  std::memcpy(farewell.text, text.c_str(), text.size() + 1);
  farewell.complete = 1;
  // Of their own, because an error of one connection ends the waits of its buffer.
  std::vector<std::unique_ptr<gloo::transport::UnboundBuffer>> sends;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    sends.push_back(context_->createUnboundBuffer(&farewell, sizeof(farewell)));
    try {
      sends.back()->send(peer, kFarewellSlot);
    } catch (const std::exception&) {  // lost
      sends.pop_back();
    }
  }
  const auto deadline = std::chrono::steady_clock::now() + kFarewellTimeout;
  for (const auto& send : sends) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    try {
      send->waitSend(nullptr, std::max(left, std::chrono::milliseconds(0)));
    } catch (const std::exception&) {  // lost meanwhile
    }
  }
  try {  // a wait with no time left closes all connections of Gloo (0.5, UnboundBuffer::waitRecv)
    context_->createUnboundBuffer(&farewell, sizeof(farewell))->waitRecv(nullptr, std::chrono::milliseconds(0));
  } catch (const std::exception&) {
  }
}

void Mesh::WakeAll() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (RunningCall* call : running_) call->Wake();
  if (watched_ && failure_.kind != Outcome::kDone) watched_->abortWaitRecv();
}

std::string Mesh::Problem(const Call& call) const {
  if (!connected_) return "the workers are not connected";
  const auto& members = call.members;
  if (call.place < 0 || call.place >= static_cast<int>(members.size()) || members[call.place] != rank_) {
    return "place: not that of this worker among the members";
  }
  const std::set<int> ranks(members.begin(), members.end());
  if (ranks.size() != members.size() || *ranks.begin() < 0 || *ranks.rbegin() >= size()) {
    return "members: not different ranks of the mesh";
  }
  const bool message = call.collective == Collective::kSend || call.collective == Collective::kReceive;
  if (call.peer < 0 || call.peer >= static_cast<int>(members.size()) || (message && call.peer == call.place)) {
    return "peer: not the place of another member";
  }
  return "";
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
  const Outcome outcome{Outcome::kExhausted, "no thread is left for a call: " + problem};
  Abort(outcome.kind, outcome.message);
  kept->done(outcome);
}

Outcome Mesh::Execute(Call& call) {
  RunningCall running(*this, call);
  const Outcome outcome = Attempt(call, running);
  if (outcome.kind == Outcome::kDone) return outcome;
  // The others wait for this worker's part of the call. A later call with the same key would be taken for it.
  Abort(outcome.kind, outcome.message);
  // Until then the buffers of the call remain: behind the rest of a message without one, Gloo would send nothing more.
  std::unique_lock<std::mutex> lock(mutex_);
  watched_last_.wait(lock, [this] { return !watching_; });
  return outcome;
}

Outcome Mesh::Attempt(Call& call, RunningCall& running) {
  try {
    if (call.prepare) {
      const Outcome prepared = call.prepare();
      if (prepared.kind != Outcome::kDone) return prepared;
    }
    running.Run();
    return {};
  } catch (const CallEnded& ended) {
    return ended.outcome;
  } catch (const std::bad_alloc&) {
    return {Outcome::kExhausted, "no memory is left for a call"};
  } catch (const std::exception& error) {
    return {Outcome::kFailed, WithoutPlace(error.what())};
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
