// What may come to the port of a worker while the workers connect: nothing of it ends them, or keeps the right ones out.
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

#include "check.h"
#include "tfpar_ops/transport/doorway.h"

namespace {

using tfpar::Doorway;
using tfpar::Enter;
using tfpar::Greeting;
using tfpar::Place;

constexpr char kToken[] = "0123456789abcdef0123456789ABCDEF";

tfpar::Deadline Soon(int ms = 20000) { return std::chrono::steady_clock::now() + std::chrono::milliseconds(ms); }

// A stranger's connection.
class Stranger {
 public:
  explicit Stranger(const Doorway& doorway) : descriptor_(socket(AF_INET, SOCK_STREAM, 0)) {
    const std::string address = doorway.address();
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.find(' ') + 1))));
    CHECK(connect(descriptor_, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0, std::strerror(errno));
  }
  ~Stranger() { close(descriptor_); }
  Stranger(const Stranger&) = delete;

  void Send(const std::string& bytes) const { (void)!send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL); }

  // Bytes that come before the connection is closed.
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

std::string Bytes(const Greeting& greeting) { return {reinterpret_cast<const char*>(&greeting), sizeof(greeting)}; }

// As worker 1 of 3 greets worker 0 if it knows the token.
Greeting Right() {
  Greeting greeting;
  std::memcpy(greeting.purpose, "tfpar/3", 8);
  greeting.from = 1;
  greeting.to = 0;
  greeting.size = 3;
  std::memcpy(greeting.token, kToken, 16);
  return greeting;
}

std::string RandomBytes(std::mt19937& generator, size_t length) {
  std::string bytes(length, 0);
  for (char& byte : bytes) byte = static_cast<char>(generator());
  return bytes;
}

void EveryoneEnters(Doorway& doorway) {
  for (const int rank : {1, 2}) {
    const int there = Enter({rank, 3, kToken}, 0, doorway.address(), Soon());
    const int here = doorway.Await(rank, Soon());
    char byte = 'x';
    CHECK(write(there, &byte, 1) == 1 && read(here, &byte, 1) == 1, "a byte from worker " + std::to_string(rank));
    close(there);
    close(here);
  }
}

TEST(StrangersAreDroppedAndCounted) {
  Doorway doorway({0, 3, kToken}, "127.0.0.1");
  std::mt19937 generator(1);
  uint64_t strangers = 0;
  const auto refused = [&](const std::string& bytes) {
    const Stranger stranger(doorway);
    stranger.Send(bytes);
    if (bytes.size() < sizeof(Greeting)) return;
    CHECK(stranger.UntilClosed().empty(), "a stranger was answered");
  };
  for (int turn = 0; turn < 300; ++turn, ++strangers) refused(RandomBytes(generator, generator() % 300));
  // All but one bit of the right greeting, each of which has to matter.
  for (size_t bit = 0; bit < 8 * sizeof(Greeting); ++bit, ++strangers) {
    std::string bytes = Bytes(Right());
    bytes[bit / 8] ^= static_cast<char>(1 << (bit % 8));
    refused(bytes);
  }
  for (const size_t length : {size_t{0}, size_t{1}, size_t{8}, sizeof(Greeting) - 1}) {
    refused(Bytes(Right()).substr(0, length));
    ++strangers;
  }
  for (const int32_t rank : {0, -1, 3, INT32_MAX, INT32_MIN}) {  // who knows the token, but is nobody who should come
    Greeting greeting = Right();
    greeting.from = rank;
    refused(Bytes(greeting));
    ++strangers;
  }
  refused(RandomBytes(generator, size_t{4} << 20));
  refused("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\nConnection: keep-alive\r\n\r\n");
  strangers += 2;
  EveryoneEnters(doorway);
  while (doorway.dropped() < strangers) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(doorway.dropped() == strangers, std::to_string(doorway.dropped()) + " of " + std::to_string(strangers));
}

TEST(AThousandOpenConnectionsKeepNobodyOut) {
  Doorway doorway({0, 3, kToken}, "127.0.0.1");
  std::vector<std::unique_ptr<Stranger>> silent;
  for (int i = 0; i < 400; ++i) silent.push_back(std::make_unique<Stranger>(doorway));
  EveryoneEnters(doorway);
  for (int turn = 0; turn < 6; ++turn) {
    for (int i = 0; i < 100; ++i) {
      const size_t place = (100 * turn + i) % silent.size();
      silent[place] = nullptr;
      silent[place] = std::make_unique<Stranger>(doorway);
      silent[place]->Send("tfpar/3");  // and no more
    }
  }
  EveryoneEnters(doorway);
  CHECK(doorway.dropped() >= 900, std::to_string(doorway.dropped()));
}

TEST(AHalfGreetingIsDroppedInTime) {
  Doorway doorway({0, 3, kToken}, "127.0.0.1");
  const Stranger stranger(doorway);
  stranger.Send(Bytes(Right()).substr(0, 20));
  CHECK(stranger.UntilClosed().empty(), "a stranger was answered");
  CHECK(doorway.dropped() == 1, std::to_string(doorway.dropped()));
}

TEST(AGreetingMayArriveInParts) {
  Doorway doorway({0, 3, kToken}, "127.0.0.1");
  const Stranger peer(doorway);
  for (const char byte : Bytes(Right())) {
    peer.Send(std::string(1, byte));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  close(doorway.Await(1, Soon()));
  const std::string answer = peer.UntilClosed();
  CHECK(answer.size() == sizeof(Greeting) && answer.find(std::string(kToken).substr(16)) != std::string::npos, answer);
}

// Who answers in the place of a worker, and repeats the greeting it was sent, is not taken for it.
TEST(AnImpostorThatRepeatsTheGreetingIsNotEntered) {
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
      char bytes[sizeof(Greeting)];
      if (recv(connection, bytes, sizeof(bytes), MSG_WAITALL) > 0) (void)!send(connection, bytes, sizeof(bytes), MSG_NOSIGNAL);
      close(connection);
    }
  });
  std::string message;
  try {
    Enter({1, 3, kToken}, 0, "127.0.0.1 " + std::to_string(ntohs(own.sin_port)), Soon(300));
  } catch (const std::exception& error) {
    message = error.what();
  }
  CHECK(message.find("does not know this run's token") != std::string::npos, message);
  impostor.join();
  close(listening);
}

TEST(NobodyComes) {
  Doorway doorway({0, 3, kToken}, "127.0.0.1");
  { const Stranger stranger(doorway); }
  std::string message;
  try {
    doorway.Await(1, Soon(100));
  } catch (const std::exception& error) {
    message = error.what();
  }
  CHECK(message.find("did not connect in time; 1 connections that did not know") == 0, message);
}

}  // namespace
