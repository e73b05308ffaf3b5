// A running call of a mesh. It may block its thread.
#ifndef TFPAR_OPS_TRANSPORT_RUNNING_CALL_H_
#define TFPAR_OPS_TRANSPORT_RUNNING_CALL_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tfpar_ops/transport/mesh.h"

namespace tfpar {

// Longer than any run: a timeout of Gloo would close all connections.
constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);

// Sums and payloads are sent in chunks of about this size: while one is added up, the next ones are being sent, and little
// memory is needed for received bytes. A message costs tens of microseconds of processor time; 256 KiB to 1 MiB are equally fast
// on the four hosts of docs/benchmarks/exchange.md.
constexpr int64_t kChunkBytes = int64_t{512} << 10;

// Gloo's messages begin with a place in its source code; this returns the rest, which is for users.
std::string WithoutPlace(const std::string& message);

// Thrown within a call.
struct CallEnded {
  Outcome outcome;
};

// The buffer of the messages to and from one member. Messages with the same key between two workers arrive in the order in
// which both sides request them.
struct Port {
  int rank = 0;
  std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
  int receives = 0;  // requested, and not yet waited for
  int sends = 0;
  int early = 0;     // receives that completed before they were waited for
};

class RunningCall {
 public:
  RunningCall(Mesh& mesh, Call& call);
  ~RunningCall();
  void Run();
  // Makes the thread check the state of the mesh. The caller holds the mutex of the mesh.
  void Wake();
  std::chrono::steady_clock::time_point began() const { return began_; }

 private:
  int size() const { return static_cast<int>(call_.members.size()); }
  const char* in(size_t offset = 0) const { return static_cast<const char*>(call_.in) + offset; }
  char* out(size_t offset = 0) const { return static_cast<char*>(call_.out) + offset; }

  char* Memory(size_t bytes);  // for received bytes, until the end of the call; begins at a cache line
  Port& AddPort(int place, const void* memory, size_t bytes);
  void Register();
  uint64_t Slot(int phase) const;
  void Receive(Port& port, int phase, size_t offset, size_t bytes);
  void Send(Port& port, int phase, size_t offset, size_t bytes);
  void WaitReceive(Port& port);
  void WaitSend(Port& port);  // waits for one send, if there is one
  void WaitSends(Port& port);
  void Check();
  bool Drain(Port& port);
  [[noreturn]] void Lost(int rank, const std::string& error);

  void Exchange(bool rows_differ, const void* own_out);  // all-gather and all-to-all
  void Sum(bool gather);                                 // all-reduce and reduce-scatter
  void SumSmall();
  void AddInOrder(size_t own, const std::vector<char*>& received, size_t bytes, char* result);
  void Broadcast();
  void Message();
  void Barrier();
  class Pipeline;
  void Coded();

  Mesh& mesh_;
  Call& call_;
  const uint64_t key_;  // of the call, and of its group
  const std::chrono::steady_clock::time_point began_;
  std::vector<SpareMemory::Block> memory_;
  std::vector<std::unique_ptr<Port>> ports_;
  bool registered_ = false;
};

}  // namespace tfpar

#endif  // TFPAR_OPS_TRANSPORT_RUNNING_CALL_H_
