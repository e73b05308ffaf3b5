#include "tfpar_ops/transport/doorway.h"

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
#include <utility>

namespace tfpar {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr char kPurpose[] = "tfpar/3";
static_assert(sizeof(kPurpose) == sizeof(Greeting::purpose), "with its zero at the end");

// A worker sends its greeting as soon as it is connected.
constexpr milliseconds kPatience{5000};
// Where more connections wait to be heard, the oldest is dropped: they must not use up the descriptors of the process.
constexpr size_t kMostGuests = 64;
constexpr int kBacklog = 1024;
constexpr milliseconds kPause{20}, kLongestPause{500}, kConnect{3000};

Greeting GreetingOf(const Place& place, int to, bool answer) {
  Greeting greeting;
  std::memcpy(greeting.purpose, kPurpose, sizeof(kPurpose));
  greeting.from = place.rank;
  greeting.to = to;
  greeting.size = place.size;
  const size_t length = std::min(place.token.size(), kTokenBytes), half = (length + 1) / 2;
  const size_t begin = answer ? half : 0, end = answer ? length : half;
  std::memcpy(greeting.token, place.token.data() + begin, end - begin);
  return greeting;
}

// Takes the same time whatever the difference is.
bool Same(const Greeting& a, const Greeting& b) {
  const auto* x = reinterpret_cast<const unsigned char*>(&a);
  const auto* y = reinterpret_cast<const unsigned char*>(&b);
  unsigned char difference = 0;
  for (size_t i = 0; i < sizeof(Greeting); ++i) difference |= static_cast<unsigned char>(x[i] ^ y[i]);
  return difference == 0;
}

std::runtime_error Failure(const std::string& what, int error) { return std::runtime_error(what + ": " + std::strerror(error)); }

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

// Closes the descriptor at its end, unless it was taken out.
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

// One attempt; `problem` says why it returned -1.
int EnterOnce(const Place& place, int to, const addrinfo& address, Deadline deadline, std::string& problem) {
  Descriptor connection(socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (connection.get() < 0) throw Failure("socket", errno);
  pollfd ready = {connection.get(), POLLOUT, 0};
  int error = 0;
  socklen_t length = sizeof(error);
  if (connect(connection.get(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return problem = std::strerror(errno), -1;
    if (poll(&ready, 1, RemainingMs(std::min(deadline, steady_clock::now() + kConnect))) == 0) {
      return problem = "does not answer", -1;
    }
    getsockopt(connection.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return problem = std::strerror(error), -1;
  }
  const Greeting own = GreetingOf(place, to, /*answer=*/false);
  if (send(connection.get(), &own, sizeof(own), MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(own))) {
    return problem = "closed the connection", -1;
  }
  Place peer = place;
  peer.rank = to;
  const Greeting expected = GreetingOf(peer, place.rank, /*answer=*/true);
  Greeting answer;
  size_t received = 0;
  ready.events = POLLIN;
  while (received < sizeof(answer)) {
    const int left = RemainingMs(deadline);
    if (left == 0) return problem = "does not answer", -1;
    poll(&ready, 1, left);
    const ssize_t count =
        recv(connection.get(), reinterpret_cast<char*>(&answer) + received, sizeof(answer) - received, MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (count <= 0) return problem = "closed the connection, as it does where it does not know this run's token", -1;
    received += count;
  }
  if (!Same(answer, expected)) return problem = "who answered in its place does not know this run's token", -1;
  return connection.Take();
}

}  // namespace

Doorway::Doorway(const Place& place, const std::string& host) : place_(place), admitted_(place.size, -1) {
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
  thread_ = std::thread([this] { Serve(); });
}

void Doorway::Close() {
  if (closing_.exchange(true)) return;
  const uint64_t one = 1;
  while (write(wake_, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
  thread_.join();
  close(listening_);
  close(wake_);
}

Doorway::~Doorway() {
  Close();
  for (const int descriptor : admitted_) {
    if (descriptor >= 0) close(descriptor);
  }
}

int Doorway::Await(int rank, Deadline deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  int& descriptor = admitted_.at(rank);
  if (!changed_.wait_until(lock, deadline, [&] { return descriptor >= 0; })) {
    throw std::runtime_error("did not connect in time; " + std::to_string(dropped()) +
                             " connections that did not know this run's token were dropped");
  }
  return std::exchange(descriptor, -1);
}

void Doorway::Serve() {
  std::vector<pollfd> watched;
  while (!closing_) {
    const auto now = steady_clock::now();
    for (auto guest = guests_.begin(); guest != guests_.end();) {
      if (guest->leaves <= now) {
        Drop(*guest);
        guest = guests_.erase(guest);
      } else {
        ++guest;
      }
    }
    watched.assign({{wake_, POLLIN, 0}, {listening_, POLLIN, 0}});
    for (const Guest& guest : guests_) watched.push_back({guest.descriptor, POLLIN, 0});
    // The oldest guest leaves first.
    const int limit = guests_.empty() ? -1 : RemainingMs(guests_.front().leaves);
    if (poll(watched.data(), watched.size(), limit) <= 0) continue;
    size_t place = 2;
    for (auto guest = guests_.begin(); guest != guests_.end(); ++place) {
      guest = watched[place].revents != 0 && !Hear(*guest) ? guests_.erase(guest) : std::next(guest);
    }
    if (watched[1].revents != 0) Accept();
  }
  for (const Guest& guest : guests_) Drop(guest);
  guests_.clear();
}

void Doorway::Accept() {
  // Those who have come by now; others have their turn after the guests.
  for (size_t i = 0; i < kMostGuests && !closing_; ++i) {
    const int descriptor = accept4(listening_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (descriptor < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      // Out of descriptors or memory, most likely because of those who wait; or the one who connected is gone again.
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        if (guests_.empty()) {
          std::this_thread::sleep_for(kPause);
          return;
        }
        Drop(guests_.front());
        guests_.pop_front();
      }
      continue;
    }
    Guest guest;
    guest.descriptor = descriptor;
    guest.leaves = steady_clock::now() + kPatience;
    if (!Hear(guest)) continue;
    if (guests_.size() == kMostGuests) {
      Drop(guests_.front());
      guests_.pop_front();
    }
    guests_.push_back(guest);
  }
}

bool Doorway::Hear(Guest& guest) {
  char* const begin = reinterpret_cast<char*>(&guest.greeting);
  const ssize_t count = recv(guest.descriptor, begin + guest.received, sizeof(Greeting) - guest.received, MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  guest.received += std::max<ssize_t>(count, 0);
  if (count > 0 && guest.received < sizeof(Greeting)) return true;
  if (count > 0) {
    Admit(guest);
  } else {
    Drop(guest);
  }
  return false;
}

void Doorway::Admit(const Guest& guest) {
  const int rank = guest.greeting.from;
  Place peer = place_;
  peer.rank = rank;
  const bool known = Same(guest.greeting, GreetingOf(peer, place_.rank, /*answer=*/false));
  if (!known || rank <= place_.rank || rank >= place_.size) return Drop(guest);
  const Greeting answer = GreetingOf(place_, rank, /*answer=*/true);
  if (send(guest.descriptor, &answer, sizeof(answer), MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(answer))) {
    close(guest.descriptor);  // it knew the token, and comes again
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  int& place = admitted_[rank];
  if (place >= 0) close(place);  // it has given that one up
  place = guest.descriptor;
  changed_.notify_all();
}

void Doorway::Drop(const Guest& guest) {
  close(guest.descriptor);
  ++dropped_;
}

int Enter(const Place& place, int to, const std::string& address, Deadline deadline) {
  const size_t space = address.find(' ');
  if (space == std::string::npos) throw std::runtime_error("sent no address");
  const std::string host = address.substr(0, space), port = address.substr(space + 1);
  const Addresses found = Resolve(host, port.c_str(), AI_NUMERICHOST | AI_NUMERICSERV);
  std::string problem = "no time was left to connect";
  for (milliseconds pause = kPause; steady_clock::now() < deadline; pause = std::min(2 * pause, kLongestPause)) {
    const int descriptor = EnterOnce(place, to, *found, deadline, problem);
    if (descriptor >= 0) return descriptor;
    std::this_thread::sleep_for(std::min<steady_clock::duration>(pause, deadline - steady_clock::now()));
  }
  throw std::runtime_error(problem);
}

}  // namespace tfpar
