#include "tfpar_ops/transport/adopted_pairs.h"

#include <fcntl.h>
#include <gloo/common/error.h>
#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/pair.h>
#include <gloo/transport/tcp/unbound_buffer.h>
// Since May 2023, a device of Gloo listens for all of its pairs. Before, each pair listened on its own port.
#if __has_include(<gloo/transport/tcp/listener.h>)
#define TFPAR_GLOO_DEVICE_LISTENS
#include <gloo/transport/tcp/listener.h>
#include <gloo/transport/tcp/socket.h>
#endif
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <functional>
#include <future>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "tfpar_ops/transport/sigpipe.h"

namespace tfpar {
namespace {

namespace tcp = gloo::transport::tcp;

// For messages; empty if the peer has disconnected, for which Gloo's own function would throw.
tcp::Address AddressBy(int (*ask)(int, sockaddr*, socklen_t*), int connection) {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  if (ask(connection, reinterpret_cast<sockaddr*>(&address), &length) != 0) address = {};
  return tcp::Address(address);
}

class AdoptedBuffer final : public tcp::UnboundBuffer {
 public:
  using tcp::UnboundBuffer::getWeakNonOwningPtr;
  using tcp::UnboundBuffer::UnboundBuffer;

  bool TakeReceive() { return Take(recvCompletions_); }
  bool TakeSend() { return Take(sendCompletions_); }

 private:
  bool Take(int& completions) {
    std::lock_guard<std::mutex> lock(m_);
    if (completions == 0) return false;
    --completions;
    return true;
  }
};

class AdoptingContext final : public tcp::Context {
 public:
  using tcp::Context::Context;

  void AdoptPair(int rank, int connection);

  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void* memory, size_t bytes) override {
    return std::make_unique<AdoptedBuffer>(shared_from_this(), memory, bytes);
  }

  // Takes a receive that a peer has announced, if there is one.
  bool TakeAnnouncedReceive(uint64_t slot, int rank) { return Mutator(*this, slot, rank).shiftRemotePendingRecv(); }
};

// A pair that uses an existing connection. It must be created by `CreatePairs`.
class AdoptedPair final : public tcp::Pair {
 public:
  AdoptedPair(AdoptingContext* context, tcp::Device* device, int rank, std::chrono::milliseconds timeout, int connection)
      : tcp::Pair(context, device, rank, timeout), adopting_(*context) {
    std::lock_guard<std::mutex> lock(m_);
#ifndef TFPAR_GLOO_DEVICE_LISTENS
    device_->unregisterDescriptor(fd_, this);
    ::close(fd_);
    fd_ = -1;  // if this throws, the base class must not close it
#endif
    self_ = AddressBy(getsockname, connection);
    peer_ = AddressBy(getpeername, connection);
    device_->registerDescriptor(connection, EPOLLIN, this);
    fd_ = connection;
    tcp::Pair::changeState(CONNECTED);
  }

  // The loop must not call this object any more once its destructor has reached the base class.
  ~AdoptedPair() override {
    std::lock_guard<std::mutex> lock(m_);
    if (state_ != CLOSED) tcp::Pair::changeState(CLOSED);
  }

  // Gloo's own functions lock the whole context while they write. If the write failed, they would wait for the loop, which
  // waits for the context. They also announce each send, which only receives from any peer need.
  void send(gloo::transport::UnboundBuffer* buffer, uint64_t slot, size_t offset, size_t bytes) override {
    auto weak = static_cast<AdoptedBuffer*>(buffer)->getWeakNonOwningPtr();
    std::lock_guard<std::mutex> lock(m_);
    throwIfException();
    if (adopting_.TakeAnnouncedReceive(slot, rank_)) {
      sendUnboundBuffer(std::move(weak), slot, offset, bytes);
    } else {
      localPendingSend_[slot].emplace_back(std::move(weak), offset, bytes);
    }
  }

  void recv(gloo::transport::UnboundBuffer* buffer, uint64_t slot, size_t offset, size_t bytes) override {
    auto weak = static_cast<AdoptedBuffer*>(buffer)->getWeakNonOwningPtr();
    std::lock_guard<std::mutex> lock(m_);
    throwIfException();
    localPendingRecv_[slot].emplace_back(std::move(weak), offset, bytes);
    sendNotifyRecvReady(slot, bytes);
  }

  // The first is that of Gloo until 2024, the second that of 2025.
  void handleEvents(int events) { HandleEvents(events); }
  void handleEvents(tcp::Loop&, int events) { HandleEvents(events); }

 private:
  // Gloo's own function returns at once while a call writes, often for as long as copying a chunk takes, and the loop calls it
  // again and again. It must not wait for the mutex: to close a pair, its holder waits for the loop.
  void HandleEvents(int events) {
    std::unique_lock<std::mutex> lock(m_, std::try_to_lock);
    if (!lock) return std::this_thread::yield();
    if (state_ != CONNECTED) return;
    try {
      handleReadWrite(events);
    } catch (const gloo::IoException&) {  // of a write: the pair is closed, and its buffers know
    }
  }

  AdoptingContext& adopting_;
};

void AdoptingContext::AdoptPair(int rank, int connection) {
  pairs_[rank] = std::make_unique<AdoptedPair>(this, device_.get(), rank, getTimeout(), connection);
}

#ifdef TFPAR_GLOO_DEVICE_LISTENS

// Both members are private, but an explicit instantiation may name them.
std::shared_ptr<tcp::Listener>& ListenerOf(tcp::Device& device);
std::shared_ptr<tcp::Socket>& SocketOf(tcp::Listener& listener);

template <std::shared_ptr<tcp::Listener> tcp::Device::*kListener, std::shared_ptr<tcp::Socket> tcp::Listener::*kSocket>
struct PrivateMembers {
  friend std::shared_ptr<tcp::Listener>& ListenerOf(tcp::Device& device) { return device.*kListener; }
  friend std::shared_ptr<tcp::Socket>& SocketOf(tcp::Listener& listener) { return listener.*kSocket; }
};
template struct PrivateMembers<&tcp::Device::listener_, &tcp::Listener::listener_>;

// The device's port is closed before this function returns. Until then it listens on the loopback interface, and no pair
// gets what connects to it. The listener stays: a pair asks it for the address that it would tell another one.
std::shared_ptr<tcp::Device> CreateDevice(const std::string& host) {
  const char* loopback = host.find(':') == std::string::npos ? "127.0.0.1" : "::1";
  auto device = std::dynamic_pointer_cast<tcp::Device>(tcp::CreateDevice(tcp::attr(loopback)));
  tcp::Listener& listener = *ListenerOf(*device);
  device->unregisterDescriptor(SocketOf(listener)->fd(), &listener);
  SocketOf(listener).reset();
  return device;
}

void CreatePairs(tcp::Device&, const std::function<void()>& create) { create(); }

#else

std::shared_ptr<tcp::Device> CreateDevice(const std::string& host) {
  return std::dynamic_pointer_cast<tcp::Device>(tcp::CreateDevice(tcp::attr(host.c_str())));
}

// Runs a function in the thread of a device's loop, and waits for it.
class InLoop final : public tcp::Handler {
 public:
  static void Run(tcp::Device& device, std::function<void()> work) {
    InLoop task(device, std::move(work));
    if (task.ready_ < 0) throw std::runtime_error(std::string("eventfd: ") + std::strerror(errno));
    std::future<void> done = task.done_.get_future();
    device.registerDescriptor(task.ready_, EPOLLIN, &task);
    done.get();
  }

  void handleEvents(int) override {
    std::exception_ptr error;
    try {
      work_();
    } catch (...) {
      error = std::current_exception();
    }
    device_.unregisterDescriptor(ready_, this);
    std::promise<void> done = std::move(done_);  // the task ends with what follows
    if (error) {
      done.set_exception(error);
    } else {
      done.set_value();
    }
  }

 private:
  InLoop(tcp::Device& device, std::function<void()> work)
      : device_(device), work_(std::move(work)), ready_(eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK)) {}
  ~InLoop() override {
    if (ready_ >= 0) close(ready_);
  }

  tcp::Device& device_;
  const std::function<void()> work_;
  const int ready_;
  std::promise<void> done_;
};

// In the loop's thread, the only one that accepts: so a pair accepts no client before its port is closed.
void CreatePairs(tcp::Device& device, std::function<void()> create) { InLoop::Run(device, std::move(create)); }

#endif

bool Set(int connection, int level, int option, int value) {
  return setsockopt(connection, level, option, &value, sizeof(value)) == 0;
}

// A router that forgets a connection drops what is sent on it without a word. Bytes that are not acknowledged end it after
// `silence`; while there are none, so do probes, which the system of the peer answers even if its process is busy.
bool ProbeWhenSilent(int connection, std::chrono::milliseconds silence) {
  const int seconds = static_cast<int>(std::chrono::duration_cast<std::chrono::seconds>(silence).count());
  constexpr int kProbes = 3;
  const int interval = std::max(seconds / (kProbes + 1), 1);
  return Set(connection, SOL_SOCKET, SO_KEEPALIVE, 1) &&
         Set(connection, IPPROTO_TCP, TCP_KEEPIDLE, std::max(seconds - kProbes * interval, 1)) &&
         Set(connection, IPPROTO_TCP, TCP_KEEPINTVL, interval) && Set(connection, IPPROTO_TCP, TCP_KEEPCNT, kProbes) &&
         Set(connection, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(silence.count()));
}

void Prepare(int connection, std::chrono::milliseconds silence) {
  if (!Set(connection, IPPROTO_TCP, TCP_NODELAY, 1) || !ProbeWhenSilent(connection, silence) ||
      fcntl(connection, F_SETFL, fcntl(connection, F_GETFL) | O_NONBLOCK) != 0) {
    throw std::runtime_error(std::string("a connection cannot be used: ") + std::strerror(errno));
  }
}

}  // namespace

bool TakeReceive(gloo::transport::UnboundBuffer& buffer) { return static_cast<AdoptedBuffer&>(buffer).TakeReceive(); }

bool TakeSend(gloo::transport::UnboundBuffer& buffer) { return static_cast<AdoptedBuffer&>(buffer).TakeSend(); }

std::shared_ptr<gloo::transport::Context> Adopt(int rank, std::vector<int> connections, const std::string& host,
                                                std::chrono::milliseconds timeout, std::chrono::milliseconds silence) {
  const auto close_all = [&connections] {
    for (int& connection : connections) {
      if (connection >= 0) close(std::exchange(connection, -1));
    }
  };
  try {
    const BlockedSigpipe blocked;  // in the thread of the device's loop
    const auto device = CreateDevice(host);
    auto context = std::make_shared<AdoptingContext>(device, rank, static_cast<int>(connections.size()));
    context->setTimeout(timeout);
    CreatePairs(*device, [&] {
      for (size_t peer = 0; peer < connections.size(); ++peer) {
        if (connections[peer] < 0) continue;
        Prepare(connections[peer], silence);
        context->AdoptPair(static_cast<int>(peer), connections[peer]);
        connections[peer] = -1;
      }
    });
    return context;
  } catch (...) {
    close_all();
    throw;
  }
}

}  // namespace tfpar
