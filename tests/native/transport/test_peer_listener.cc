// Foreign connections to the port of a worker while the workers connect: none ends the process or blocks the peers.
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../check.h"
#include "tfpar_ops/transport/peer_listener.h"

namespace {

using tfpar::PeerListener;
using tfpar::ConnectToPeer;
using tfpar::Handshake;
using tfpar::Place;

constexpr char kToken[] = "0123456789abcdef0123456789ABCDEF";

tfpar::Deadline Soon(int ms = 20000) { return std::chrono::steady_clock::now() + std::chrono::milliseconds(ms); }

// A connection from a client that is not a peer.
class Client {
 public:
  explicit Client(const PeerListener& listener) : descriptor_(socket(AF_INET, SOCK_STREAM, 0)) {
    const std::string address = listener.address();
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.find(' ') + 1))));
    CHECK(connect(descriptor_, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0, std::strerror(errno));
  }
  ~Client() { close(descriptor_); }
  Client(const Client&) = delete;

  void Send(const std::string& bytes) const { (void)!send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL); }

  // Returns the bytes that arrive before the connection is closed.
  std::string UntilClosed() const {
    std::string all;
    char part[4096];
    while (true) {
      const ssize_t count = recv(descriptor_, part, sizeof(part), 0);
      if (count <= 0) return all;
      all.append(part, count);
    }
  }

 private:
  const int descriptor_;
};

std::string Bytes(const Handshake& handshake) { return {reinterpret_cast<const char*>(&handshake), sizeof(handshake)}; }

// The handshake that worker 1 of 3 sends to worker 0.
Handshake ValidHandshake() {
  Handshake handshake;
  std::memcpy(handshake.purpose, "tfpar/4", 8);
  handshake.from = 1;
  handshake.to = 0;
  handshake.size = 3;
  std::memcpy(handshake.token, kToken, 16);
  return handshake;
}

std::string RandomBytes(std::mt19937& generator, size_t length) {
  std::string bytes(length, 0);
  for (char& byte : bytes) byte = static_cast<char>(generator());
  return bytes;
}

void AllPeersConnect(PeerListener& listener) {
  for (const int rank : {1, 2}) {
    const int there = ConnectToPeer({rank, 3, kToken}, 0, listener.address(), Soon());
    const int here = listener.WaitForPeer(rank, Soon());
    char byte = 'x';
    CHECK(write(there, &byte, 1) == 1 && read(here, &byte, 1) == 1, "a byte from worker " + std::to_string(rank));
    close(there);
    close(here);
  }
}

TEST(OtherClientsAreDroppedAndCounted) {
  PeerListener listener({0, 3, kToken}, "127.0.0.1");
  std::mt19937 generator(1);
  uint64_t dropped = 0;
  const auto refused = [&](const std::string& bytes) {
    const Client client(listener);
    client.Send(bytes);
    if (bytes.size() < sizeof(Handshake)) return;
    CHECK(client.UntilClosed().empty(), "a client without the token got an answer");
  };
  for (int turn = 0; turn < 300; ++turn, ++dropped) refused(RandomBytes(generator, generator() % 300));
  // The valid handshake with one bit flipped: every bit must matter.
  for (size_t bit = 0; bit < 8 * sizeof(Handshake); ++bit, ++dropped) {
    std::string bytes = Bytes(ValidHandshake());
    bytes[bit / 8] ^= static_cast<char>(1 << (bit % 8));
    refused(bytes);
  }
  for (const size_t length : {size_t{0}, size_t{1}, size_t{8}, sizeof(Handshake) - 1}) {
    refused(Bytes(ValidHandshake()).substr(0, length));
    ++dropped;
  }
  for (const int32_t rank : {0, -1, 3, INT32_MAX, INT32_MIN}) {  // the right token, but not a rank that connects
    Handshake handshake = ValidHandshake();
    handshake.from = rank;
    refused(Bytes(handshake));
    ++dropped;
  }
  refused(RandomBytes(generator, size_t{4} << 20));
  refused("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\nConnection: keep-alive\r\n\r\n");
  dropped += 2;
  AllPeersConnect(listener);
  while (listener.dropped() < dropped) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(listener.dropped() == dropped, std::to_string(listener.dropped()) + " of " + std::to_string(dropped));
}

TEST(AThousandOpenConnectionsDoNotKeepPeersOut) {
  PeerListener listener({0, 3, kToken}, "127.0.0.1");
  std::vector<std::unique_ptr<Client>> silent;
  for (int i = 0; i < 400; ++i) silent.push_back(std::make_unique<Client>(listener));
  AllPeersConnect(listener);
  for (int turn = 0; turn < 6; ++turn) {
    for (int i = 0; i < 100; ++i) {
      const size_t place = (100 * turn + i) % silent.size();
      silent[place] = nullptr;
      silent[place] = std::make_unique<Client>(listener);
      silent[place]->Send("tfpar/4");  // an incomplete handshake
    }
  }
  AllPeersConnect(listener);
  CHECK(listener.dropped() >= 900, std::to_string(listener.dropped()));
}

TEST(AnIncompleteHandshakeIsDroppedInTime) {
  PeerListener listener({0, 3, kToken}, "127.0.0.1");
  const Client client(listener);
  client.Send(Bytes(ValidHandshake()).substr(0, 20));
  CHECK(client.UntilClosed().empty(), "a client without the token got an answer");
  CHECK(listener.dropped() == 1, std::to_string(listener.dropped()));
}

TEST(AHandshakeMayArriveInParts) {
  PeerListener listener({0, 3, kToken}, "127.0.0.1");
  const Client peer(listener);
  for (const char byte : Bytes(ValidHandshake())) {
    peer.Send(std::string(1, byte));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  close(listener.WaitForPeer(1, Soon()));
  const std::string answer = peer.UntilClosed();
  CHECK(answer.size() == sizeof(Handshake) && answer.find(std::string(kToken).substr(16)) != std::string::npos, answer);
}

// A server at a worker's address that sends the handshake back is not accepted as that worker.
TEST(AnImpostorThatRepeatsTheHandshakeIsRefused) {
  const int listening = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in own = {};
  own.sin_family = AF_INET;
  own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(own);
  CHECK(bind(listening, reinterpret_cast<sockaddr*>(&own), length) == 0 && listen(listening, 8) == 0, "listening");
  getsockname(listening, reinterpret_cast<sockaddr*>(&own), &length);
  std::thread impostor([listening] {
    pollfd ready = {listening, POLLIN, 0};
    while (poll(&ready, 1, 1000) == 1) {
      const int connection = accept(listening, nullptr, nullptr);
      char bytes[sizeof(Handshake)];
      if (recv(connection, bytes, sizeof(bytes), MSG_WAITALL) > 0) (void)!send(connection, bytes, sizeof(bytes), MSG_NOSIGNAL);
      close(connection);
    }
  });
  std::string message;
  try {
    ConnectToPeer({1, 3, kToken}, 0, "127.0.0.1 " + std::to_string(ntohs(own.sin_port)), Soon(300));
  } catch (const std::exception& error) {
    message = error.what();
  }
  CHECK(message.find("does not have this run's token") != std::string::npos, message);
  impostor.join();
  close(listening);
}

TEST(APeerThatDoesNotConnectIsReported) {
  PeerListener listener({0, 3, kToken}, "127.0.0.1");
  { const Client client(listener); }
  std::string message;
  try {
    listener.WaitForPeer(1, Soon(100));
  } catch (const std::exception& error) {
    message = error.what();
  }
  CHECK(message.find("did not connect in time; 1 connections without this run's token") == 0, message);
}

}  // namespace
