// A full mesh of TCP connections between the workers of a run, over Gloo, and the calls through it.
//
// One mesh serves all groups: a call lists its members, and its key distinguishes its messages from those of other calls.
// Calls of one member may overlap. Each call runs in its own thread, since Gloo's waits block. Threads are kept for later
// calls; their number has no limit, so that two workers cannot wait for each other because of one. This file does not use
// TensorFlow.
#ifndef TFPAR_OPS_TRANSPORT_MESH_H_
#define TFPAR_OPS_TRANSPORT_MESH_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tfpar_ops/transport/peer_listener.h"
#include "tfpar_ops/transport/spare_memory.h"
#include "tfpar_ops/transport/threads.h"
#include "tfpar_ops/transport/turns.h"

namespace gloo {
namespace transport {
class Context;
class UnboundBuffer;
}  // namespace transport
}  // namespace gloo

namespace tfpar {

struct CodedExchange;
class RunningCall;

// How a call ended. `message` is empty if it succeeded. kLost: another worker is the cause. The other kinds are of this worker:
// an operation of its own failed, or the transport was closed (kCancelled); the call cannot be made (kRefused); no memory or
// thread is left (kExhausted); anything else (kFailed).
struct Outcome {
  enum Kind { kDone, kLost, kCancelled, kRefused, kExhausted, kFailed };
  Kind kind = kDone;
  std::string message;
};

// Adds `n` elements of `x` to `sum`, one by one: sum[i] = sum[i] + x[i].
using AddFunction = void (*)(void* sum, const void* x, size_t n);

enum class Collective : int32_t {
  kAllReduce = 0,      // in: [bytes]; out: [bytes], the sum in the order of the members
  kReduceScatter = 1,  // in: [in_bytes]; out: [bytes], this member's share of the sum; zeros after the end of `in`
  kAllToAll = 2,       // in: [members][bytes]; out: [members][bytes]
  kAllGather = 3,      // in: [bytes]; out: [members][bytes]
  kBroadcast = 4,      // in and out: [bytes], the root's
  kSend = 5,           // in: [bytes]
  kReceive = 6,        // out: [bytes]
  kBarrier = 7,
  kCodedExchange = 8,  // see CodedExchange; `bytes` and `element_bytes` only have to be the same on all members
};

struct Call {
  Collective collective = Collective::kBarrier;
  std::vector<int> members;  // ranks in the mesh, in the order of the group
  int place = 0;             // of this worker among the members
  int peer = 0;              // place of the root, sender or receiver
  uint64_t key = 0;          // the same on all members; no other running call has it
  const void* in = nullptr;  // owned by `done`
  void* out = nullptr;       // may be `in` for an all-reduce or a broadcast
  size_t bytes = 0;
  size_t in_bytes = 0;       // of a reduce-scatter: up to `bytes` for each member
  size_t element_bytes = 1;  // of the elements that sums add
  AddFunction add = nullptr;
  std::shared_ptr<CodedExchange> coded;
  int64_t turn = 0;  // of the mesh: the order in which exchanges were started
  // Called before the call begins, in the thread that calls `done` later; an outcome other than kDone ends the call, and
  // all later ones. May be null.
  std::function<Outcome()> prepare;
  std::function<void(const Outcome&)> done;  // called once: in another thread, or by Start if there is no thread left
};

// The last message of a connection, from a worker that has failed: the cause. It names the worker that was lost first.
struct Farewell {
  char text[511] = {};
  char complete = 0;  // the last byte, so it arrives last
};

class Mesh {
 public:
  // Listens on a port of the address that `host` names, alone, until all are connected (PeerListener).
  //   names: of all workers, for messages; their number is the size of the mesh.
  //   token: of the run, up to 64 bytes. A connection without it is dropped.
  //   timeout: of Connect.
  //   silence: after which a connection is lost if the system of the peer does not answer on it, from 2 s.
  // Throws std::exception: no address of this machine.
  Mesh(int rank, std::vector<std::string> names, const std::string& host, const std::string& token,
       std::chrono::milliseconds timeout, std::chrono::milliseconds silence);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(names_.size()); }

  // The address that the other workers connect to; empty once all are connected.
  std::string address() const { return listener_ ? listener_->address() : ""; }

  // Connects to the workers of lower rank, waits for those of higher rank to connect, and stops listening.
  // Throws std::exception, with the name of the peer: it did not connect in time, or does not have the token.
  void Connect(const std::vector<std::string>& addresses);

  // Number of connections that were dropped because they did not have the token.
  uint64_t dropped() const { return listener_ ? listener_->dropped() : dropped_; }

  // Why a call cannot be made; empty if it can.
  std::string Problem(const Call& call) const;

  // Starts a call that has no problem. Does not block. A call that fails ends all later ones: see Abort.
  void Start(Call call);

  // Ends all calls of this worker, later ones included, and those of the others: it sends them the reason, and closes the
  // connections. Does not block; the first reason is kept.
  void Abort(Outcome::Kind kind, const std::string& reason);

  // Milliseconds since the oldest running call began; 0 if none is running.
  int64_t WaitingMs() const;

  // The largest number of threads that calls have needed at the same time, for tests.
  size_t threads() const { return threads_.size(); }

 private:
  friend class RunningCall;
  void Watch();
  void ReceiveFarewells();
  bool NoticeLosses();
  std::string TextOfLoss(int rank, const std::string& error) const;
  void Disconnect(const Outcome& failure);
  void WakeAll();
  Outcome Execute(Call& call);
  Outcome Attempt(Call& call, RunningCall& running);

  const int rank_;
  const std::vector<std::string> names_;
  const std::chrono::milliseconds timeout_, silence_;
  const Place place_;
  std::unique_ptr<PeerListener> listener_;  // until all are connected
  uint64_t dropped_ = 0;
  std::atomic<bool> connected_{false};
  std::shared_ptr<gloo::transport::Context> context_;
  // By rank. The thread of Gloo writes them; they may be read once an error has ended the connection.
  std::vector<Farewell> farewells_;
  std::unique_ptr<gloo::transport::UnboundBuffer> receives_farewells_;

  mutable std::mutex mutex_;                 // guards all members below
  std::set<RunningCall*> running_;
  std::vector<std::string> lost_;            // by rank: how it was lost; empty while the connection is open
  std::vector<int> losses_;                  // those ranks, in the order in which the losses were noticed
  Outcome failure_;                          // of Abort
  bool closing_ = false;                     // without a failure
  bool watching_ = false;                    // until the watcher has closed the connections, or they are all lost
  std::condition_variable watched_last_;
  char watched_byte_ = 0;
  std::unique_ptr<gloo::transport::UnboundBuffer> watched_;  // changed by the watcher
  std::thread watcher_;
  SpareMemory memory_;
  Turns turns_;
  Threads threads_;                          // last: its threads use the others
};

}  // namespace tfpar

#endif  // TFPAR_OPS_TRANSPORT_MESH_H_
