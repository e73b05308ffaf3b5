#include "tfpar_ops/transport/running_call.h"

#include <gloo/common/error.h>
#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "tfpar_ops/transport/adopted_pairs.h"

namespace tfpar {
namespace {

constexpr int kWindow = 4;
// Below this many bytes for each worker, every worker sends everything to every other one: one round trip instead of two.
constexpr size_t kSmallBytes = size_t{8} << 10;

uint64_t Mixed(uint64_t key, uint64_t part) {
  key += part + 0x9e3779b97f4a7c15u;  // splitmix64
  key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9u;
  key = (key ^ (key >> 27)) * 0x94d049bb133111ebu;
  return key ^ (key >> 31);
}

// The keys of two groups may be the same.
uint64_t KeyOf(const Call& call) {
  uint64_t key = call.key;
  for (const int member : call.members) key = Mixed(key, member);
  return key;
}

}  // namespace

RunningCall::RunningCall(Mesh& mesh, Call& call)
    : mesh_(mesh), call_(call), key_(KeyOf(call)), began_(std::chrono::steady_clock::now()) {}

RunningCall::~RunningCall() {
  if (registered_) {
    std::lock_guard<std::mutex> lock(mesh_.mutex_);
    mesh_.running_.erase(this);
  }
  ports_.clear();  // waits until no receive writes to the memory any more
  for (SpareMemory::Block& block : memory_) mesh_.memory_.Return(std::move(block));
}

char* RunningCall::Memory(size_t bytes) {
  memory_.push_back(mesh_.memory_.Take(bytes));
  return memory_.back().data.get();
}

void RunningCall::Wake() {
  for (const auto& port : ports_) {
    port->buffer->abortWaitRecv();
    port->buffer->abortWaitSend();
  }
}

void RunningCall::Run() {
  switch (call_.collective) {
    case Collective::kAllReduce:
      return call_.bytes * (size() - 1) <= kSmallBytes ? SumSmall() : Sum(/*gather=*/true);
    case Collective::kReduceScatter:
      return Sum(/*gather=*/false);
    case Collective::kAllToAll:
      return Exchange(/*rows_differ=*/true, in(call_.bytes * call_.place));
    case Collective::kAllGather:
      return Exchange(/*rows_differ=*/false, call_.in);
    case Collective::kBroadcast:
      return Broadcast();
    case Collective::kSend:
    case Collective::kReceive:
      return Message();
    case Collective::kBarrier:
      return Barrier();
    case Collective::kCodedExchange:
      return Coded();
  }
}

Port& RunningCall::AddPort(int place, const void* memory, size_t bytes) {
  auto port = std::make_unique<Port>();
  port->rank = call_.members[place];
  port->buffer = mesh_.context_->createUnboundBuffer(const_cast<void*>(memory), bytes);
  ports_.push_back(std::move(port));
  return *ports_.back();
}

// From here on other threads may wake this call; its ports do not change.
void RunningCall::Register() {
  std::lock_guard<std::mutex> lock(mesh_.mutex_);
  if (mesh_.failure_.kind != Outcome::kDone) throw CallEnded{mesh_.failure_};
  mesh_.running_.insert(this);
  registered_ = true;
}

// Sizes are part of the key: Gloo ends the process if a message is longer than the receive (0.5, Pair::prepareRead).
uint64_t RunningCall::Slot(int phase) const {
  uint64_t mixed = key_;
  for (const uint64_t part : {static_cast<uint64_t>(call_.collective), static_cast<uint64_t>(call_.bytes),
                              static_cast<uint64_t>(call_.in_bytes), static_cast<uint64_t>(call_.element_bytes),
                              static_cast<uint64_t>(phase)}) {
    mixed = Mixed(mixed, part);
  }
  return mixed >> 1;
}

void RunningCall::Lost(int rank, const std::string& error) {
  std::lock_guard<std::mutex> lock(mesh_.mutex_);
  if (mesh_.failure_.kind != Outcome::kDone) throw CallEnded{mesh_.failure_};  // which closed the connections
  throw CallEnded{{Outcome::kLost, mesh_.TextOfLoss(rank, error)}};
}

void RunningCall::Receive(Port& port, int phase, size_t offset, size_t bytes) {
  try {
    port.buffer->recv(port.rank, Slot(phase), offset, bytes);
    ++port.receives;
  } catch (const gloo::IoException& error) {
    Lost(port.rank, error.what());
  }
}

void RunningCall::Send(Port& port, int phase, size_t offset, size_t bytes) {
  try {
    port.buffer->send(port.rank, Slot(phase), offset, bytes);
    ++port.sends;
  } catch (const gloo::IoException& error) {
    Lost(port.rank, error.what());
  }
}

void RunningCall::WaitReceive(Port& port) {
  while (port.early == 0) {
    try {
      if (port.buffer->waitRecv(nullptr, kForever)) {
        --port.receives;
        return;
      }
    } catch (const gloo::IoException& error) {
      Lost(port.rank, error.what());
    }
    Check();
  }
  --port.early;
}

void RunningCall::WaitSend(Port& port) {
  while (port.sends > 0) {
    try {
      if (port.buffer->waitSend(nullptr, kForever)) {
        --port.sends;
        return;
      }
    } catch (const gloo::IoException& error) {
      Lost(port.rank, error.what());
    }
    Check();
  }
}

void RunningCall::WaitSends(Port& port) {
  while (port.sends > 0) WaitSend(port);
}

// Ends the call if the mesh has failed, or if it still needs a lost worker. Of several lost workers the first is named: the
// others may have ended because of it.
void RunningCall::Check() {
  std::lock_guard<std::mutex> lock(mesh_.mutex_);
  if (mesh_.failure_.kind != Outcome::kDone) throw CallEnded{mesh_.failure_};
  for (const int rank : mesh_.losses_) {
    for (const auto& port : ports_) {
      if (port->rank != rank || Drain(*port)) continue;
      mesh_.failure_ = {Outcome::kLost, mesh_.lost_[rank]};
      throw CallEnded{mesh_.failure_};
    }
  }
}

// Returns whether the messages to and from a lost worker are complete. A worker that has ended after its part of the call is
// not a loss: its messages have arrived, and those to it were sent.
//
// When a connection breaks, Gloo 0.5 does not notify the buffer whose message is incomplete (Pair::signalException). Once a loss
// has been noticed, no message of its connection is completed any more.
bool RunningCall::Drain(Port& port) {
  for (; port.receives > 0; --port.receives, ++port.early) {
    if (!TakeReceive(*port.buffer)) return false;
  }
  for (; port.sends > 0; --port.sends) {
    if (!TakeSend(*port.buffer)) return false;
  }
  return true;
}

void RunningCall::Exchange(bool rows_differ, const void* own) {
  const size_t bytes = call_.bytes;
  std::vector<Port*> senders, receivers;
  for (int turn = 1; turn < size(); ++turn) {  // every worker begins with a different peer
    const int place = (call_.place + turn) % size();
    senders.push_back(&AddPort(place, in(rows_differ ? bytes * place : 0), bytes));
    receivers.push_back(&AddPort(place, out(bytes * place), bytes));
  }
  Register();
  if (bytes == 0) return;
  for (Port* port : receivers) Receive(*port, 0, 0, bytes);
  for (Port* port : senders) Send(*port, 0, 0, bytes);
  std::memcpy(out(bytes * call_.place), own, bytes);
  for (Port* port : receivers) WaitReceive(*port);
  for (Port* port : senders) WaitSends(*port);
}

// Adds up the members' values in the order of the members, so that all members compute the same bits, in every algorithm here.
//   own: offset of this worker's values in `in`.
//   received: the other members' values, by place; overwritten.
void RunningCall::AddInOrder(size_t own, const std::vector<char*>& received, size_t bytes, char* result) {
  const size_t elements = bytes / call_.element_bytes;
  char* sum = received[0];
  if (call_.place == 0) {
    sum = result;
    if (result != in(own)) std::memcpy(result, in(own), bytes);
  }
  for (int place = 1; place < size(); ++place) {
    call_.add(sum, place == call_.place ? in(own) : received[place], elements);
  }
  if (sum != result) std::memcpy(result, sum, bytes);
}

void RunningCall::SumSmall() {
  const size_t bytes = call_.bytes;
  char* all = Memory(bytes * size());
  // `in` may be the memory of the result, and is being sent until the end.
  char* own = all + bytes * call_.place;
  std::vector<char*> received(size());
  std::vector<Port*> senders, receivers;
  for (int turn = 1; turn < size(); ++turn) {
    const int place = (call_.place + turn) % size();
    received[place] = all + bytes * place;
    senders.push_back(&AddPort(place, own, bytes));
    receivers.push_back(&AddPort(place, received[place], bytes));
  }
  Register();
  if (bytes == 0) return;
  std::memcpy(own, call_.in, bytes);
  for (Port* port : receivers) Receive(*port, 0, 0, bytes);
  for (Port* port : senders) Send(*port, 0, 0, bytes);
  for (Port* port : receivers) WaitReceive(*port);
  for (Port* port : senders) WaitSends(*port);
  AddInOrder(0, received, bytes, out());
}

void RunningCall::Sum(bool gather) {
  const int members = size();
  const size_t element = call_.element_bytes;
  const size_t total = gather ? call_.bytes : call_.in_bytes;
  const size_t shard = gather ? (call_.bytes / element + members - 1) / members * element : call_.bytes;
  const size_t chunk = std::max<size_t>(kChunkBytes / element * element, element);
  auto begin = [&](int place) { return std::min(total, shard * place); };
  auto length = [&](int place) { return begin(place + 1) - begin(place); };
  auto chunks = [&](int place) { return static_cast<int>((length(place) + chunk - 1) / chunk); };
  auto chunk_bytes = [&](int place, int number) { return std::min(chunk, length(place) - number * chunk); };
  const int own_chunks = chunks(call_.place);
  char* result = gather ? out(begin(call_.place)) : out();

  struct Peer {
    int place;
    Port *parts, *sends, *sums, *gathered;
    char* memory;
  };
  std::vector<Peer> peers;
  for (int turn = 1; turn < members; ++turn) {
    Peer peer{};
    peer.place = (call_.place + turn) % members;
    peer.memory = Memory(std::min<size_t>(kWindow * chunk, length(call_.place)));
    peer.parts = &AddPort(peer.place, peer.memory, kWindow * chunk);
    peer.sends = &AddPort(peer.place, in(begin(peer.place)), length(peer.place));
    if (gather) {
      peer.sums = &AddPort(peer.place, result, length(call_.place));
      peer.gathered = &AddPort(peer.place, out(begin(peer.place)), length(peer.place));
    }
    peers.push_back(peer);
  }
  Register();
  if (const size_t missing = shard - length(call_.place); !gather && missing > 0) {
    std::memset(out(length(call_.place)), 0, missing);
  }

  auto receive_part = [&](Peer& peer, int number) {
    Receive(*peer.parts, 0, number % kWindow * chunk, chunk_bytes(call_.place, number));
  };
  for (int number = 0; number < std::min(kWindow, own_chunks); ++number) {
    for (Peer& peer : peers) receive_part(peer, number);
  }
  // The message there is the sum of a part, whose owner had received all of that part: this worker's values of it were sent
  // before, so `in` and `out` may be the same memory.
  for (Peer& peer : peers) {
    for (int number = 0; gather && number < chunks(peer.place); ++number) {
      Receive(*peer.gathered, 1, number * chunk, chunk_bytes(peer.place, number));
    }
  }
  for (int number = 0; number < static_cast<int>((shard + chunk - 1) / chunk); ++number) {
    for (Peer& peer : peers) {
      if (number < chunks(peer.place)) Send(*peer.sends, 0, number * chunk, chunk_bytes(peer.place, number));
    }
  }
  std::vector<char*> received(members);
  for (int number = 0; number < own_chunks; ++number) {
    const size_t offset = number * chunk, bytes = chunk_bytes(call_.place, number);
    for (Peer& peer : peers) {
      WaitReceive(*peer.parts);
      received[peer.place] = peer.memory + number % kWindow * chunk;
    }
    AddInOrder(begin(call_.place) + offset, received, bytes, result + offset);
    for (Peer& peer : peers) {
      if (gather) Send(*peer.sums, 1, offset, bytes);
      if (number + kWindow < own_chunks) receive_part(peer, number + kWindow);
    }
  }
  for (Peer& peer : peers) {
    for (int number = 0; gather && number < chunks(peer.place); ++number) WaitReceive(*peer.gathered);
  }
  for (Peer& peer : peers) {
    WaitSends(*peer.sends);
    if (gather) WaitSends(*peer.sums);
  }
}

void RunningCall::Broadcast() {
  const bool root = call_.place == call_.peer;
  std::vector<Port*> ports;
  for (int place = 0; place < size(); ++place) {
    if (place == call_.place || (!root && place != call_.peer)) continue;
    ports.push_back(&AddPort(place, root ? call_.in : call_.out, call_.bytes));
  }
  Register();
  if (call_.bytes == 0) return;
  if (root && call_.out != call_.in) std::memcpy(call_.out, call_.in, call_.bytes);
  for (Port* port : ports) root ? Send(*port, 0, 0, call_.bytes) : Receive(*port, 0, 0, call_.bytes);
  for (Port* port : ports) root ? WaitSends(*port) : WaitReceive(*port);
}

void RunningCall::Message() {
  // Both sides must compute the same key.
  const bool sends = call_.collective == Collective::kSend;
  call_.collective = Collective::kSend;
  Port& port = AddPort(call_.peer, sends ? call_.in : call_.out, call_.bytes);
  Register();
  if (call_.bytes == 0) return;
  sends ? Send(port, 0, 0, call_.bytes) : Receive(port, 0, 0, call_.bytes);
  sends ? WaitSends(port) : WaitReceive(port);
}

void RunningCall::Barrier() {
  char* bytes = Memory(size() + 1);
  call_.bytes = 1;
  call_.out = bytes;
  call_.in = bytes + size();
  Exchange(/*rows_differ=*/false, call_.in);
}

}  // namespace tfpar
