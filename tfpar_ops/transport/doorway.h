// The one port of a worker while the workers connect: it lets in those that know the token of the run, and no one else.
//
// What connects must send a greeting of fixed length, with the token in it, within a few seconds. Whatever else comes, or does
// not come, is dropped and counted; no byte of it decides how much is read. Nothing listens once all peers are in. This file
// knows nothing of Gloo, which would end the process over bytes that it does not understand (0.5, GLOO_ENFORCE in its loop).
#ifndef TFPAR_OPS_TRANSPORT_DOORWAY_H_
#define TFPAR_OPS_TRANSPORT_DOORWAY_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace tfpar {

using Deadline = std::chrono::steady_clock::time_point;

constexpr size_t kTokenBytes = 64;

// What each side of a new connection sends to the other. The two directions have different parts of the token, so that who
// answers in the place of a peer cannot repeat what it was sent.
struct Greeting {
  char purpose[8] = {};
  int32_t from = 0, to = 0, size = 0, reserved = 0;
  char token[kTokenBytes / 2] = {};
};
static_assert(sizeof(Greeting) == 56, "its length is part of the protocol");

// A place in a mesh, as a greeting shows it.
struct Place {
  int rank = 0;
  int size = 0;
  std::string token;  // up to kTokenBytes
};

class Doorway {
 public:
  // Listens on a port of the address that `host` names, alone, which the system chooses.
  // Throws std::exception: no address of this machine.
  Doorway(const Place& place, const std::string& host);
  ~Doorway();
  Doorway(const Doorway&) = delete;
  Doorway& operator=(const Doorway&) = delete;

  // Where it listens: the address, and the address and the port separated by a space.
  const std::string& host() const { return host_; }
  std::string address() const { return host_ + " " + port_; }

  // Waits for a worker of higher rank, and returns the descriptor of its connection, which is the caller's from then on.
  // Throws std::exception: it has not come in time.
  int Await(int rank, Deadline deadline);

  // Stops to listen; those who have not been let in by now are dropped.
  void Close();

  // Connections that were dropped.
  uint64_t dropped() const { return dropped_; }

 private:
  struct Guest {
    int descriptor = -1;
    size_t received = 0;
    Greeting greeting;
    Deadline leaves;
  };

  void Serve();
  void Accept();
  bool Hear(Guest& guest);  // whether it has to wait for more
  void Admit(const Guest& guest);
  void Drop(const Guest& guest);

  const Place place_;
  std::string host_, port_;
  int listening_ = -1;
  int wake_ = -1;
  std::atomic<uint64_t> dropped_{0};
  std::atomic<bool> closing_{false};
  std::list<Guest> guests_;  // of the thread
  std::mutex mutex_;         // of `admitted_`
  std::condition_variable changed_;
  std::vector<int> admitted_;  // descriptors by rank; -1 where none is
  std::thread thread_;
};

// Connects to the doorway of worker `to` at an address that it has published, and makes sure that it knows the token too.
// Tries again until it is let in or the time is over; returns the descriptor.
// Throws std::exception.
int Enter(const Place& place, int to, const std::string& address, Deadline deadline);

}  // namespace tfpar

#endif  // TFPAR_OPS_TRANSPORT_DOORWAY_H_
