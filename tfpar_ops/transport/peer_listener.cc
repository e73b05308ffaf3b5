#include "tfpar_ops/transport/peer_listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace tfpar {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr char kPurpose[] = "tfpar/4";
static_assert(sizeof(kPurpose) == sizeof(Handshake::purpose), "with its zero at the end");

// A peer sends its handshake as soon as it is connected.
constexpr milliseconds kHandshakeTimeout{5000};
// Beyond this many pending connections, the oldest is dropped: they must not exhaust the descriptors of the process.
constexpr size_t kMaxPending = 64;
constexpr int kBacklog = 1024;
constexpr milliseconds kRetryDelay{20}, kMaxRetryDelay{500}, kConnectTimeout{3000};

Handshake HandshakeOf(const Place& place, int to, bool answer) {
  Handshake handshake;
  std::memcpy(handshake.purpose, kPurpose, sizeof(kPurpose));
  handshake.from = place.rank;
  handshake.to = to;
  handshake.size = place.size;
  const size_t length = std::min(place.token.size(), kTokenBytes), half = (length + 1) / 2;
  const size_t begin = answer ? half : 0, end = answer ? length : half;
  std::memcpy(handshake.token, place.token.data() + begin, end - begin);
  return handshake;
}

// Constant time: the duration does not depend on where the handshakes differ.
bool Same(const Handshake& a, const Handshake& b) {
  const auto* x = reinterpret_cast<const unsigned char*>(&a);
  const auto* y = reinterpret_cast<const unsigned char*>(&b);
  unsigned char difference = 0;
  for (size_t i = 0; i < sizeof(Handshake); ++i) difference |= static_cast<unsigned char>(x[i] ^ y[i]);
  return difference == 0;
}

std::runtime_error Failure(const std::string& what, int error) {
  return std::runtime_error(what + ": " + std::strerror(error));
}

struct FreeAddresses {
  void operator()(addrinfo* found) const { freeaddrinfo(found); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

Addresses Resolve(const std::string& host, const char* port, int flags) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), port, &hints, &found);
  if (error != 0) throw std::runtime_error(host + ": " + gai_strerror(error));
  return Addresses(found);
}

int RemainingMs(Deadline deadline) {
  const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1000 * 1000));
}

// Closes the descriptor on destruction, unless it was taken.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return number_; }
  int Take() { return std::exchange(number_, -1); }

 private:
  int number_;
};

// One attempt; where it returns -1, `problem` is the reason.
int TryConnect(const Place& place, int to, const addrinfo& address, Deadline deadline, std::string& problem) {
  Descriptor connection(socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (connection.get() < 0) throw Failure("socket", errno);
  pollfd ready = {connection.get(), POLLOUT, 0};
  int error = 0;
  socklen_t length = sizeof(error);
  if (connect(connection.get(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return problem = std::strerror(errno), -1;
    if (poll(&ready, 1, RemainingMs(std::min(deadline, steady_clock::now() + kConnectTimeout))) == 0) {
      return problem = "does not answer", -1;
    }
    getsockopt(connection.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return problem = std::strerror(error), -1;
  }
  const Handshake own = HandshakeOf(place, to, /*answer=*/false);
  if (send(connection.get(), &own, sizeof(own), MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(own))) {
    return problem = "closed the connection", -1;
  }
  Place peer = place;
  peer.rank = to;
  const Handshake expected = HandshakeOf(peer, place.rank, /*answer=*/true);
  Handshake answer;
  size_t received = 0;
  ready.events = POLLIN;
  while (received < sizeof(answer)) {
    const int left = RemainingMs(deadline);
    if (left == 0) return problem = "does not answer", -1;
    poll(&ready, 1, left);
    const ssize_t count =
        recv(connection.get(), reinterpret_cast<char*>(&answer) + received, sizeof(answer) - received, MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (count <= 0) return problem = "closed the connection, as it does if it does not have this run's token", -1;
    received += count;
  }
  if (!Same(answer, expected)) return problem = "the server at its address does not have this run's token", -1;
  return connection.Take();
}

}  // namespace

PeerListener::PeerListener(const Place& place, const std::string& host) : place_(place), connected_(place.size, -1) {
  const Addresses found = Resolve(host, "0", 0);
  int error = 0;
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
    Descriptor bound(socket(one->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (bound.get() >= 0 && bind(bound.get(), one->ai_addr, one->ai_addrlen) == 0 && listen(bound.get(), kBacklog) == 0) {
      listening_ = bound.Take();
      break;
    }
    error = errno;
  }
  if (listening_ < 0) throw Failure("cannot listen on " + host, error);
  sockaddr_storage own = {};
  socklen_t length = sizeof(own);
  char name[NI_MAXHOST], port[NI_MAXSERV];
  if (getsockname(listening_, reinterpret_cast<sockaddr*>(&own), &length) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&own), length, name, sizeof(name), port, sizeof(port),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0 ||
      (wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) < 0) {
    error = errno;
    close(listening_);
    throw Failure("cannot listen on " + host, error);
  }
  host_ = name;
  port_ = port;
  try {
    thread_ = std::thread([this] { Serve(); });
  } catch (const std::system_error&) {  // no thread is left
    close(listening_);
    close(wake_);
    throw;
  }
}

void PeerListener::Close() {
  if (closing_.exchange(true)) return;
  const uint64_t one = 1;
  while (write(wake_, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
  thread_.join();
  close(listening_);
  close(wake_);
}

PeerListener::~PeerListener() {
  Close();
  for (const int descriptor : connected_) {
    if (descriptor >= 0) close(descriptor);
  }
}

int PeerListener::WaitForPeer(int rank, Deadline deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  int& descriptor = connected_.at(rank);
  if (!changed_.wait_until(lock, deadline, [&] { return descriptor >= 0; })) {
    throw std::runtime_error("did not connect in time; " + std::to_string(dropped()) +
                             " connections without this run's token were dropped");
  }
  return std::exchange(descriptor, -1);
}

void PeerListener::Serve() {
  std::vector<pollfd> watched;
  while (!closing_) {
    const auto now = steady_clock::now();
    for (auto connection = pending_.begin(); connection != pending_.end();) {
      if (connection->deadline <= now) {
        Drop(*connection);
        connection = pending_.erase(connection);
      } else {
        ++connection;
      }
    }
    watched.assign({{wake_, POLLIN, 0}, {listening_, POLLIN, 0}});
    for (const PendingConnection& connection : pending_) watched.push_back({connection.descriptor, POLLIN, 0});
    // The oldest connection has the first deadline.
    const int limit = pending_.empty() ? -1 : RemainingMs(pending_.front().deadline);
    if (poll(watched.data(), watched.size(), limit) <= 0) continue;
    size_t place = 2;
    for (auto connection = pending_.begin(); connection != pending_.end(); ++place) {
      const bool done = watched[place].revents != 0 && !ReadHandshake(*connection);
      connection = done ? pending_.erase(connection) : std::next(connection);
    }
    if (watched[1].revents != 0) Accept();
  }
  for (const PendingConnection& connection : pending_) Drop(connection);
  pending_.clear();
}

void PeerListener::Accept() {
  // A limited number at a time, so that pending connections are read in between.
  for (size_t i = 0; i < kMaxPending && !closing_; ++i) {
    const int descriptor = accept4(listening_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (descriptor < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      // Descriptors or memory are exhausted, most likely by pending connections; or the client has disconnected already.
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        if (pending_.empty()) {
          std::this_thread::sleep_for(kRetryDelay);
          return;
        }
        Drop(pending_.front());
        pending_.pop_front();
      }
      continue;
    }
    PendingConnection connection;
    connection.descriptor = descriptor;
    connection.deadline = steady_clock::now() + kHandshakeTimeout;
    if (!ReadHandshake(connection)) continue;
    if (pending_.size() == kMaxPending) {
      Drop(pending_.front());
      pending_.pop_front();
    }
    pending_.push_back(connection);
  }
}

bool PeerListener::ReadHandshake(PendingConnection& connection) {
  char* const begin = reinterpret_cast<char*>(&connection.handshake);
  const size_t missing = sizeof(Handshake) - connection.received;
  const ssize_t count = recv(connection.descriptor, begin + connection.received, missing, MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  connection.received += std::max<ssize_t>(count, 0);
  if (count > 0 && connection.received < sizeof(Handshake)) return true;
  if (count > 0) {
    Verify(connection);
  } else {
    Drop(connection);
  }
  return false;
}

void PeerListener::Verify(const PendingConnection& connection) {
  const int rank = connection.handshake.from;
  Place peer = place_;
  peer.rank = rank;
  const bool known = Same(connection.handshake, HandshakeOf(peer, place_.rank, /*answer=*/false));
  if (!known || rank <= place_.rank || rank >= place_.size) return Drop(connection);
  const Handshake answer = HandshakeOf(place_, rank, /*answer=*/true);
  if (send(connection.descriptor, &answer, sizeof(answer), MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(answer))) {
    close(connection.descriptor);  // a peer, which connects again
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  int& place = connected_[rank];
  if (place >= 0) close(place);  // the peer has given up that connection
  place = connection.descriptor;
  changed_.notify_all();
}

void PeerListener::Drop(const PendingConnection& connection) {
  ++dropped_;  // before the client can see the end of its connection
  close(connection.descriptor);
}

int ConnectToPeer(const Place& place, int to, const std::string& address, Deadline deadline) {
  const size_t space = address.find(' ');
  if (space == std::string::npos) throw std::runtime_error("sent no address");
  const std::string host = address.substr(0, space), port = address.substr(space + 1);
  const Addresses found = Resolve(host, port.c_str(), AI_NUMERICHOST | AI_NUMERICSERV);
  std::string problem = "no time was left to connect";
  for (milliseconds pause = kRetryDelay; steady_clock::now() < deadline; pause = std::min(2 * pause, kMaxRetryDelay)) {
    const int descriptor = TryConnect(place, to, *found, deadline, problem);
    if (descriptor >= 0) return descriptor;
    std::this_thread::sleep_for(std::min<steady_clock::duration>(pause, deadline - steady_clock::now()));
  }
  throw std::runtime_error(problem);
}

}  // namespace tfpar
