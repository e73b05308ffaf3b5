#include "tfpar_ops/transport/mesh.h"

#include <gloo/common/error.h>
#include <gloo/transport/address.h>
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "tfpar_ops/transport/running_call.h"

namespace tfpar {
namespace {

// Calls have keys without this bit (RunningCall::Slot).
constexpr uint64_t kWatchSlot = ~uint64_t{0};
constexpr uint64_t kTokenSlot = kWatchSlot - 1;
constexpr size_t kTokenBytes = 64;

// Gloo waits up to five times the time-out of a pair for its connection (0.5, Pair::waitUntil).
constexpr int kConnectFactor = 5;

struct Greeting {
  char token[kTokenBytes] = {};
  int32_t rank = 0;
  int32_t size = 0;
};

}  // namespace

std::string WithoutPlace(const std::string& message) {
  const size_t end = message.find("] ");
  return message.empty() || message[0] != '[' || end == std::string::npos ? message : message.substr(end + 2);
}

Mesh::Mesh(int rank, std::vector<std::string> names, const std::string& host, std::chrono::milliseconds timeout)
    : rank_(rank), names_(std::move(names)), timeout_(timeout), lost_(names_.size()) {
  gloo::transport::tcp::attr attr(host.c_str());
  device_ = gloo::transport::tcp::CreateDevice(attr);
  context_ = device_->createContext(rank_, size());
  context_->setTimeout(timeout / kConnectFactor);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank_) context_->createPair(peer);
  }
}

Mesh::~Mesh() {
  Abort(Outcome::kCancelled, "the transport was closed");
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    if (watched_) watched_->abortWaitRecv();
  }
  if (watcher_.joinable()) watcher_.join();
}

std::string Mesh::addresses() const {
  // Addresses have one length, so that those of a peer are found by its rank.
  std::string all;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    const std::vector<char> bytes = context_->getPair(peer)->address().bytes();
    all.append(bytes.begin(), bytes.end());
  }
  return all;
}

void Mesh::Connect(const std::vector<std::string>& addresses, const std::string& token) {
  Greeting own;
  std::memcpy(own.token, token.data(), std::min(token.size(), kTokenBytes));
  own.rank = rank_;
  own.size = size();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    try {
      const std::string& all = addresses.at(peer);
      const size_t length = all.size() / (size() - 1);
      const int place = rank_ - (rank_ > peer);  // a peer has no address for itself
      if (length == 0 || all.size() % (size() - 1) != 0) throw std::runtime_error("sent no addresses");
      const auto begin = all.begin() + place * length;
      context_->getPair(peer)->connect(std::vector<char>(begin, begin + length));
    } catch (const std::exception& error) {
      throw std::runtime_error(names_[peer] + ": " + WithoutPlace(error.what()));
    }
  }
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    Greeting sent = own, received;
    try {
      auto out = context_->createUnboundBuffer(&sent, sizeof(sent));
      auto in = context_->createUnboundBuffer(&received, sizeof(received));
      in->recv(peer, kTokenSlot);
      out->send(peer, kTokenSlot);
      in->waitRecv(nullptr, timeout_);
      out->waitSend(nullptr, timeout_);
    } catch (const std::exception& error) {
      throw std::runtime_error(names_[peer] + ": " + WithoutPlace(error.what()));
    }
    if (std::memcmp(received.token, own.token, kTokenBytes) != 0 || received.rank != peer || received.size != own.size) {
      throw std::runtime_error(names_[peer] + ": who answered in its place does not know this run's token");
    }
  }
  if (size() > 1) watcher_ = std::thread([this] { Watch(); });
}

void Mesh::Watch() {
  // Gloo tells only those who wait for a message of a peer that it is gone. A receive that never completes makes one of them,
  // so that a call that waits for another worker, which may itself wait for the lost one, is told at once.
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
    } catch (const std::exception&) {  // the next turn finds out whose connection it is
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
  threads_.Run([this, kept] {
    const Outcome outcome = Execute(*kept);
    const auto done = std::move(kept->done);
    done(outcome);
  });
}

Outcome Mesh::Execute(Call& call) {
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
