// A full mesh of TCP connections between the workers of a run, over Gloo, and the calls that go through it.
//
// One mesh serves all groups: a call names its members, and a key tells its messages from those of other calls. Calls of one
// member may overlap. Every call runs in a thread of its own, since Gloo's waits block; threads are kept for later calls, and
// no limit on their number could make two workers wait for each other. This file knows nothing of TensorFlow.
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

#include "tfpar_ops/transport/doorway.h"
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

// How a call ended. `message` is empty where it went well.
struct Outcome {
  enum Kind { kDone, kLost, kCancelled, kRefused };
  Kind kind = kDone;
  std::string message;
};

// Adds `n` elements of `x` to `sum`, one by one: sum[i] = sum[i] + x[i].
using AddFunction = void (*)(void* sum, const void* x, size_t n);

enum class Collective : int32_t {
  kAllReduce = 0,      // in: [bytes]; out: [bytes], the sum in the order of the members
  kReduceScatter = 1,  // in: [members][bytes]; out: [bytes], the sum of the members' rows of this member's place
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
  uint64_t key = 0;          // the same on all members, and no other call's that is under way
  const void* in = nullptr;  // kept by `done`
  void* out = nullptr;       // may be `in` for an all-reduce or a broadcast
  size_t bytes = 0;
  size_t element_bytes = 1;  // of which sums consist
  AddFunction add = nullptr;
  std::shared_ptr<CodedExchange> coded;
  int64_t turn = 0;  // of the mesh: the order in which exchanges were started
  // Called before the call begins, in the thread that calls `done` later; the call ends at once if this says so. Or null.
  std::function<Outcome()> prepare;
  std::function<void(const Outcome&)> done;  // called once, in another thread
};

class Mesh {
 public:
  // Listens on a port of the address that `host` names, alone, until all are connected (Doorway).
  //   names: of all workers, for messages; their number is the size of the mesh.
  //   token: of the run, up to 64 bytes. A connection that does not know it is dropped.
  //   timeout: of Connect.
  // Throws std::exception: no address of this machine.
  Mesh(int rank, std::vector<std::string> names, const std::string& host, const std::string& token,
       std::chrono::milliseconds timeout);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(names_.size()); }

  // Where this worker listens, as the others need it; empty once all are connected.
  std::string address() const { return doorway_ ? doorway_->address() : ""; }

  // Connects to all, and stops to listen. The workers of lower rank are connected to, those of higher rank connect.
  // Throws std::exception, with the name of the peer: it did not connect in time, or does not know the token.
  void Connect(const std::vector<std::string>& addresses);

  // Connections that were dropped because they did not know the token.
  uint64_t dropped() const { return doorway_ ? doorway_->dropped() : dropped_; }

  // Starts a call. Does not block.
  void Start(Call call);

  // Ends all calls, those of later included. The first reason stays.
  void Abort(Outcome::Kind kind, const std::string& reason);

  // Milliseconds that the oldest call has been under way; 0 where none is.
  int64_t WaitingMs() const;

  // Threads that calls have needed at a time, for tests.
  size_t threads() const { return threads_.size(); }

 private:
  friend class RunningCall;
  void Watch();
  void WakeAll();
  Outcome Execute(Call& call);

  const int rank_;
  const std::vector<std::string> names_;
  const std::chrono::milliseconds timeout_;
  const Place place_;
  std::unique_ptr<Doorway> doorway_;  // until all are connected
  uint64_t dropped_ = 0;
  std::shared_ptr<gloo::transport::Context> context_;

  mutable std::mutex mutex_;                 // of all below
  std::set<class RunningCall*> running_;
  std::vector<std::string> lost_;            // what ended the connection to each rank; empty while it stands
  std::vector<int> losses_;                  // those ranks, in the order in which it was noticed
  Outcome failure_;                          // of Abort
  bool closing_ = false;
  std::unique_ptr<gloo::transport::UnboundBuffer> watched_;
  std::thread watcher_;
  SpareMemory memory_;
  Turns turns_;
  Threads threads_;                          // last: its threads use the others
};

}  // namespace tfpar

#endif  // TFPAR_OPS_TRANSPORT_MESH_H_
