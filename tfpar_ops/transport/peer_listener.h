// The listener of a worker while the workers connect: it accepts only peers that have the token of the run.
//
// A client must send a handshake of fixed length, which contains the token, within a few seconds. Any other connection is
// dropped and counted; no received byte determines how much is read. The port is closed once all peers are connected. This
// file does not use Gloo, which ends the process on bytes that it cannot parse (0.5, GLOO_ENFORCE in its loop).
#ifndef TFPAR_OPS_TRANSPORT_PEER_LISTENER_H_
#define TFPAR_OPS_TRANSPORT_PEER_LISTENER_H_

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

// The message that each side of a new connection sends to the other. The two directions carry different parts of the token, so
// that a server without the token cannot answer by sending the client's handshake back.
struct Handshake {
  char purpose[8] = {};
  int32_t from = 0, to = 0, size = 0, reserved = 0;
  char token[kTokenBytes / 2] = {};
};
static_assert(sizeof(Handshake) == 56, "its length is part of the protocol");

// A worker's place in a mesh, as the handshake states it.
struct Place {
  int rank = 0;
  int size = 0;
  std::string token;  // up to kTokenBytes
};

class PeerListener {
 public:
  // Listens on the address that `host` names, and no other, on a port that the system chooses.
  // Throws std::exception: no address of this machine.
  PeerListener(const Place& place, const std::string& host);
  ~PeerListener();
  PeerListener(const PeerListener&) = delete;
  PeerListener& operator=(const PeerListener&) = delete;

  // The address on which it listens; and the address and the port, separated by a space.
  const std::string& host() const { return host_; }
  std::string address() const { return host_ + " " + port_; }

  // Waits until a worker of higher rank is connected, and returns the descriptor of its connection, which the caller then owns.
  // Throws std::exception: it did not connect in time.
  int WaitForPeer(int rank, Deadline deadline);

  // Stops listening; connections whose handshake is not complete are dropped.
  void Close();

  // Connections that were dropped.
  uint64_t dropped() const { return dropped_; }

 private:
  struct PendingConnection {
    int descriptor = -1;
    size_t received = 0;
    Handshake handshake;
    Deadline deadline;
  };

  void Serve();
  void Accept();
  bool ReadHandshake(PendingConnection& connection);  // returns whether more bytes are to come
  void Verify(const PendingConnection& connection);
  void Drop(const PendingConnection& connection);

  const Place place_;
  std::string host_, port_;
  int listening_ = -1;
  int wake_ = -1;
  std::atomic<uint64_t> dropped_{0};
  std::atomic<bool> closing_{false};
  std::list<PendingConnection> pending_;  // used by the thread alone; the oldest first
  std::mutex mutex_;  // guards `connected_`
  std::condition_variable changed_;
  std::vector<int> connected_;  // descriptors by rank; -1 for none
  std::thread thread_;
};

// Connects to the listener of worker `to` at the address that it has published, and verifies that it has the token too.
// Retries until the handshake succeeds or the deadline has passed; returns the descriptor.
// Throws std::exception: it did not succeed in time.
int ConnectToPeer(const Place& place, int to, const std::string& address, Deadline deadline);

}  // namespace tfpar

#endif  // TFPAR_OPS_TRANSPORT_PEER_LISTENER_H_
