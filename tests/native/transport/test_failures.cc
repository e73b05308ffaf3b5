// Calls that fail, workers that leave, and connections that are refused.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../check.h"
#include "tfpar_ops/transport/mesh.h"
#include "tfpar_ops/transport/peer_listener.h"
#include "tfpar_ops/transport/threads.h"
#include "workers.h"

constexpr size_t kHeaderBytes = 48;  // of Gloo's messages

// The length of a message, with its header, whose next write fails, as on a connection that answers nothing any more.
static std::atomic<size_t> failing_bytes{0};
// The length of a message of which only the first half is sent, and the length of the rest.
static std::atomic<size_t> halved_bytes{0}, unsent_bytes{0};

// Instead of the C library's, also for Gloo.
extern "C" ssize_t writev(int descriptor, const iovec* parts, int count) {
  size_t bytes = 0;
  for (int i = 0; i < count; ++i) bytes += parts[i].iov_len;
  size_t expected = bytes;
  if (bytes > 0 && failing_bytes.compare_exchange_strong(expected, 0)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    errno = ETIMEDOUT;
    return -1;
  }
  if (bytes > 0 && bytes == unsent_bytes) {
    errno = EAGAIN;
    return -1;
  }
  if (bytes == 0 || bytes != halved_bytes) return syscall(SYS_writev, descriptor, parts, count);
  const iovec halves[2] = {parts[0], {parts[1].iov_base, parts[1].iov_len / 2}};
  const ssize_t sent = syscall(SYS_writev, descriptor, halves, 2);
  unsent_bytes = bytes - sent;
  return sent;
}

namespace {

// Sockets of this process that accept connections.
int ListeningSockets() {
  constexpr int kDescriptors = 4096;
  int found = 0;
  for (int descriptor = 0; descriptor < kDescriptors; ++descriptor) {
    int listens = 0;
    socklen_t length = sizeof(listens);
    found += getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) == 0 && listens != 0;
  }
  return found;
}

using tfpar::Call;
using tfpar::Collective;
using tfpar::Mesh;
using tfpar::Outcome;
using workers::Connected;
using workers::Meshes;
using workers::SumCall;
using workers::Together;
using workers::Waiting;

// Neither the transport's own port is open any more, nor one of Gloo.
TEST(ConnectedWorkersListenOnNoPort) {
  const Meshes meshes = Connected(3);
  CHECK(ListeningSockets() == 0, std::to_string(ListeningSockets()));
  const tfpar::PeerListener listener({0, 2, "token"}, "127.0.0.1");
  CHECK(ListeningSockets() == 1, "the count sees no socket");
}

// Also where nothing is sent, so that a connection of which a router drops everything is lost in time.
TEST(SilentConnectionsAreProbed) {
  const Meshes meshes = Connected(2);
  int found = 0;
  for (int descriptor = 0; descriptor < 4096; ++descriptor) {
    const auto option = [descriptor](int level, int name) {
      int value = 0;
      socklen_t length = sizeof(value);
      return getsockopt(descriptor, level, name, &value, &length) == 0 ? value : 0;
    };
    if (option(IPPROTO_TCP, TCP_USER_TIMEOUT) == 0) continue;
    ++found;
    CHECK(option(SOL_SOCKET, SO_KEEPALIVE) != 0, "no probes");
    CHECK(option(IPPROTO_TCP, TCP_USER_TIMEOUT) == 12000, std::to_string(option(IPPROTO_TCP, TCP_USER_TIMEOUT)));
    const int probes = option(IPPROTO_TCP, TCP_KEEPCNT) * option(IPPROTO_TCP, TCP_KEEPINTVL);
    CHECK(option(IPPROTO_TCP, TCP_KEEPIDLE) + probes == 12, std::to_string(probes));
  }
  CHECK(found == 2, std::to_string(found) + " ends of a connection");
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they need address space without a limit
TEST(ATaskIsRefusedWhereNoThreadIsLeft) {
  std::atomic<int> ran{0};
  int accepted = 0;
  std::string problem;
  {
    tfpar::Threads threads;
    std::promise<void> end;
    const std::shared_future<void> ending = end.get_future().share();
    const auto task = [&ran, ending] {
      ending.wait();
      ++ran;
    };
    rlimit before;
    CHECK(getrlimit(RLIMIT_AS, &before) == 0, "getrlimit");
    const rlimit none{std::min<rlim_t>(1 << 20, before.rlim_max), before.rlim_max};
    CHECK(setrlimit(RLIMIT_AS, &none) == 0, "setrlimit");
    // The first ones get the memory of threads that have ended.
    for (; accepted < 1000 && (problem = threads.Run(task)).empty(); ++accepted) {
    }
    CHECK(setrlimit(RLIMIT_AS, &before) == 0, "setrlimit");
    CHECK(!problem.empty(), "all tasks were accepted");
    CHECK(threads.Run(task).empty(), "a task that came when there was memory again");
    end.set_value();
  }
  CHECK(ran == accepted + 1, std::to_string(ran));
}

TEST(AListenerWithoutAThreadLeavesNoDescriptors) {
  const auto open = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return static_cast<size_t>(std::distance(begin(all), end(all)));
  };
  std::vector<std::unique_ptr<tfpar::PeerListener>> listening;
  listening.reserve(1000);
  bool refused = false;
  const size_t before = open();
  rlimit limit;
  CHECK(getrlimit(RLIMIT_AS, &limit) == 0, "getrlimit");
  const rlimit none{std::min<rlim_t>(1 << 20, limit.rlim_max), limit.rlim_max};
  CHECK(setrlimit(RLIMIT_AS, &none) == 0, "setrlimit");
  while (!refused && listening.size() < listening.capacity()) {
    try {
      listening.push_back(std::make_unique<tfpar::PeerListener>(tfpar::Place{0, 2, "token"}, "127.0.0.1"));
    } catch (const std::system_error&) {
      refused = true;
    }
  }
  CHECK(setrlimit(RLIMIT_AS, &limit) == 0, "setrlimit");
  CHECK(refused, "all listeners have a thread");
  CHECK(open() == before + 2 * listening.size(), std::to_string(open()));
}
#endif

// A call of worker 0 fails before it begins, and worker 1 waits for it. No later call of worker 0 may be taken for it, and
// worker 1 is told why.
void CheckThatNoLaterCallIsTakenFor(Call failing, Outcome::Kind kind, const std::string& message) {
  Meshes meshes = Connected(2);
  std::vector<float> in(4, 1.f), out0(4), out1(4);
  Waiting waiting, other;
  other.Start(*meshes[1], SumCall(Collective::kAllReduce, {0, 1}, 1, 1, in.data(), out1.data(), 4));
  for (Call& call : std::vector<Call>{failing, SumCall(Collective::kAllReduce, {0, 1}, 0, 1, in.data(), out0.data(), 4)}) {
    waiting.Start(*meshes[0], std::move(call));
    const Outcome outcome = waiting.Wait()[0];
    CHECK(outcome.kind == kind && outcome.message == message, outcome.message);
  }
  const Outcome outcome = other.Wait()[0];
  CHECK(outcome.kind == Outcome::kLost && outcome.message == "worker 0 failed: " + message, outcome.message);
}

TEST(ACallThatIsRefusedDoesNotBegin) {
  Call call;
  call.members = {0, 1};
  call.prepare = [] { return Outcome{Outcome::kRefused, "no variable"}; };
  CheckThatNoLaterCallIsTakenFor(std::move(call), Outcome::kRefused, "no variable");
}

TEST(ACallWithoutMemoryEndsThoseAfterIt) {
  Call call;
  call.members = {0, 1};
  call.prepare = []() -> Outcome { throw std::bad_alloc(); };
  CheckThatNoLaterCallIsTakenFor(std::move(call), Outcome::kExhausted, "no memory is left for a call");
}

// As after another error of the program, from any thread.
TEST(AnAbortEndsTheCallsOfTheOthersByItsReason) {
  for (const Outcome::Kind kind : {Outcome::kFailed, Outcome::kLost}) {
    Meshes meshes = Connected(3);
    std::vector<float> in(4, 1.f), out1(4), out2(4);
    Waiting waiting;
    waiting.Start(*meshes[1], SumCall(Collective::kAllReduce, {0, 1}, 1, 1, in.data(), out1.data(), 4));
    meshes[0]->Abort(kind, "worker 2 does not answer");
    const std::string expected = kind == Outcome::kLost ? "worker 2 does not answer" : "worker 0 failed: worker 2 does not answer";
    Outcome outcome = waiting.Wait()[0];
    CHECK(outcome.kind == Outcome::kLost && outcome.message == expected, outcome.message);
    // Of worker 1, which passes the reason on.
    waiting.Start(*meshes[2], SumCall(Collective::kAllReduce, {1, 2}, 1, 2, in.data(), out2.data(), 4));
    outcome = waiting.Wait()[0];
    CHECK(outcome.kind == Outcome::kLost && outcome.message == expected, outcome.message);
  }
}

TEST(ALongReasonIsCutBetweenCharacters) {
  Meshes meshes = Connected(2);
  std::string reason;
  for (int i = 0; i < 1000; ++i) reason += "\xc3\xa9";
  std::vector<float> in(4), out(4);
  Waiting waiting;
  waiting.Start(*meshes[1], SumCall(Collective::kAllReduce, {0, 1}, 1, 1, in.data(), out.data(), 4));
  meshes[0]->Abort(Outcome::kFailed, reason);
  const std::string message = waiting.Wait()[0].message, begin = "worker 0 failed: ";
  CHECK(message.size() == begin.size() + 492, std::to_string(message.size()));
  CHECK(message == begin + reason.substr(0, 492), message);
}

double ProcessorSeconds() {
  rusage usage;
  CHECK(getrusage(RUSAGE_SELF, &usage) == 0, "getrusage");
  return usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + 1e-6 * (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

// Gloo's own thread would try to read the rest of the message without a pause, and have no memory for it.
TEST(AnAbortWithinAMessageLeavesNothingRunning) {
  const size_t elements = size_t{16} << 20;
  std::vector<float> in(elements, 1.f), out0(2 * elements), out1(2 * elements);
  bool ended = false;
  for (int attempt = 0; attempt < 50 && !ended; ++attempt) {
    Meshes meshes = Connected(2);
    Waiting waiting, other;
    waiting.Start(*meshes[0], SumCall(Collective::kAllGather, {0, 1}, 0, 1, in.data(), out0.data(), elements));
    other.Start(*meshes[1], SumCall(Collective::kAllGather, {0, 1}, 1, 1, in.data(), out1.data(), elements));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    meshes[0]->Abort(Outcome::kFailed, "no reason");
    ended = waiting.Wait()[0].kind == Outcome::kFailed && other.Wait()[0].kind == Outcome::kLost;
    const double before = ProcessorSeconds();
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    const double used = ProcessorSeconds() - before;
    CHECK(used < 0.1, std::to_string(used) + " s");
  }
  CHECK(ended, "no call was under way");
}

// Worker 1 waits for worker 0, which waits for the lost worker: the call of worker 1 still fails and names that worker.
TEST(ALostWorkerEndsTheCallsOfAllOthersByName) {
  Meshes meshes = Connected(3);
  std::vector<float> in(1 << 20), out(3 << 20), small(4), answer(4);
  Waiting waiting;
  waiting.Start(*meshes[0], SumCall(Collective::kAllReduce, {0, 1, 2}, 0, 1, in.data(), out.data(), in.size()));
  Call receive = SumCall(Collective::kReceive, {0, 2}, 0, 2, nullptr, answer.data(), answer.size());
  receive.peer = 1;
  waiting.Start(*meshes[0], receive);
  std::vector<float> in1(in), out1(out);
  waiting.Start(*meshes[1], SumCall(Collective::kAllReduce, {0, 1, 2}, 1, 1, in1.data(), out1.data(), in1.size()));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  CHECK(meshes[0]->WaitingMs() >= 90, std::to_string(meshes[0]->WaitingMs()));
  meshes[2].reset();
  const std::vector<Outcome> outcomes = waiting.Wait();
  CHECK(outcomes.size() == 3, std::to_string(outcomes.size()));
  for (const Outcome& outcome : outcomes) {
    CHECK(outcome.kind == Outcome::kLost, outcome.message);
    CHECK(outcome.message.find("lost worker 2: ") == 0, outcome.message);
  }
  // Later calls fail with the same message.
  waiting.Start(*meshes[0], SumCall(Collective::kAllReduce, {0, 2}, 0, 3, small.data(), answer.data(), 4));
  CHECK(waiting.Wait()[0].message.find("lost worker 2: ") == 0, "a call that came later");
  CHECK(meshes[0]->WaitingMs() == 0, std::to_string(meshes[0]->WaitingMs()));
}

// In the middle of a message to worker 0, of which worker 1 knows nothing.
TEST(ALossWithinAMessageIsNamedToAllOthers) {
  constexpr size_t kElements = 5000;
  std::vector<float> values(kElements), received(kElements), small(4);
  Meshes meshes = Connected(3);
  Waiting lost, first, other;
  Call send = SumCall(Collective::kSend, {0, 2}, 1, 1, values.data(), nullptr, kElements);
  halved_bytes = kHeaderBytes + kElements * sizeof(float);
  lost.Start(*meshes[2], send);
  Call receive = SumCall(Collective::kReceive, {0, 2}, 0, 1, nullptr, received.data(), kElements);
  receive.peer = 1;
  first.Start(*meshes[0], receive);
  other.Start(*meshes[1], SumCall(Collective::kReceive, {0, 1}, 1, 2, nullptr, small.data(), small.size()));
  while (unsent_bytes == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  meshes[2].reset();
  halved_bytes = unsent_bytes = 0;
  lost.Wait();
  for (Waiting* waiting : {&first, &other}) {
    const Outcome outcome = waiting->Wait()[0];
    CHECK(outcome.kind == Outcome::kLost && outcome.message.find("lost worker 2: ") == 0, outcome.message);
  }
}

// Returns how the sender's call has ended, where the first who sees the error is the thread that writes.
Outcome SendOnABrokenConnection(bool receiver_is_first) {
  constexpr size_t kElements = 1000;
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
  const Meshes meshes = Connected(3);
  std::vector<float> values(kElements);
  const auto message = [&](Collective collective, int place, int peer, uint64_t key) {
    Call call = SumCall(collective, {0, 1, 2}, place, key, values.data(), values.data(), kElements);
    call.peer = peer;
    return call;
  };
  std::promise<Outcome> ended;
  std::future<Outcome> outcome = ended.get_future();
  Waiting receiver, third;
  Call send = message(Collective::kSend, 0, 1, 1);
  send.done = [&ended](const Outcome& outcome) { ended.set_value(outcome); };
  failing_bytes = kHeaderBytes + kElements * sizeof(float);
  if (receiver_is_first) {
    receiver.Start(*meshes[1], message(Collective::kReceive, 1, 0, 1));
    pause();
  }
  meshes[0]->Start(send);
  pause();
  if (!receiver_is_first) receiver.Start(*meshes[1], message(Collective::kReceive, 1, 0, 1));
  third.Start(*meshes[2], message(Collective::kReceive, 2, 0, 2));  // the loop of worker 0 hears of it meanwhile
  if (outcome.wait_for(std::chrono::seconds(30)) != std::future_status::ready) {
    std::fputs("a call on a broken connection waits forever\n", stderr);
    std::_Exit(1);
  }
  receiver.Wait();
  third.Wait();
  return outcome.get();
}

TEST(AConnectionThatBreaksWhileACallWritesIsLost) {
  for (const bool receiver_is_first : {true, false}) {  // then the thread of the call sends; or that of Gloo
    const Outcome outcome = SendOnABrokenConnection(receiver_is_first);
    CHECK(outcome.kind == Outcome::kLost && outcome.message.find("lost worker 1: writev") == 0, outcome.message);
  }
}

// Gloo writes without MSG_NOSIGNAL.
TEST(NoThreadOfTheTransportIsEndedByASignal) {
  const Meshes meshes = Connected(2);
  Together(2, [&](int rank) {
    std::vector<float> value(4);
    Waiting waiting;
    waiting.Start(*meshes[rank], SumCall(Collective::kAllReduce, {0, 1}, rank, 1, value.data(), value.data(), 4));
    waiting.Wait();
  });
  int threads = 0, unblocked = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(task.path() / "status");
    for (std::string word; status >> word;) {
      if (word != "SigBlk:") continue;
      status >> word;
      unblocked += (std::stoull(word, nullptr, 16) >> (SIGPIPE - 1) & 1) == 0;
      ++threads;
    }
  }
  CHECK(threads >= 7, std::to_string(threads));  // of each worker: Gloo's, the watcher, that of the call
  CHECK(unblocked == 1, std::to_string(unblocked));  // this one
}

TEST(CallsThatCannotBeMadeHaveAProblem) {
  const Meshes meshes = Connected(2);
  const auto check = [&](std::vector<int> members, int place, int peer, const std::string& problem) {
    Call call;
    call.collective = Collective::kSend;
    call.members = std::move(members);
    call.place = place;
    call.peer = peer;
    const std::string found = meshes[0]->Problem(call);
    CHECK(problem.empty() ? found.empty() : found.find(problem) == 0, found + ", expected " + problem);
  };
  check({0, 1}, 0, 1, "");
  check({0, 1}, 0, 0, "peer");
  check({0, 1}, 0, 2, "peer");
  check({0, 1}, 1, 0, "place");
  check({0, 1}, 2, 0, "place");
  check({0, 0}, 0, 1, "members");
  check({0, 2}, 0, 1, "members");
  Mesh alone(0, {"a", "b"}, "127.0.0.1", "token", std::chrono::seconds(1), workers::kSilence);
  CHECK(alone.Problem(Call{}) == "the workers are not connected", alone.Problem(Call{}));
  std::string message;
  try {
    meshes[0]->Connect({"", ""});
  } catch (const std::exception& error) {
    message = error.what();
  }
  CHECK(message.find("a mesh connects once") != std::string::npos, message);
}

// A worker that leaves when its last call is complete does not make the last call of the others fail.
TEST(AWorkerMayLeaveFirst) {
  for (int turn = 0; turn < 5; ++turn) {
    Meshes meshes = Connected(3);
    Together(3, [&](int rank) {
      std::vector<float> in(200000, 1.f), out(200000);
      Waiting waiting;
      waiting.Start(*meshes[rank], SumCall(Collective::kAllReduce, {0, 1, 2}, rank, 1, in.data(), out.data(), in.size()));
      const Outcome outcome = waiting.Wait()[0];
      CHECK(outcome.kind == Outcome::kDone, "rank " + std::to_string(rank) + ": " + outcome.message);
      meshes[rank].reset();
    });
  }
}

TEST(AbortEndsCallsAndThoseToCome) {
  Meshes meshes = Connected(2);
  std::vector<float> in(10), out(10);
  Waiting waiting;
  waiting.Start(*meshes[0], SumCall(Collective::kAllReduce, {0, 1}, 0, 1, in.data(), out.data(), 10));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  meshes[0]->Abort(Outcome::kLost, "worker 1 does not answer");
  meshes[0]->Abort(Outcome::kCancelled, "a later reason");
  CHECK(waiting.Wait()[0].message == "worker 1 does not answer", "the call under way");
  waiting.Start(*meshes[0], SumCall(Collective::kAllReduce, {0, 1}, 0, 2, in.data(), out.data(), 10));
  CHECK(waiting.Wait()[0].message == "worker 1 does not answer", "the call after it");
}

TEST(AnotherTokenIsRefused) {
  std::vector<std::string> errors;
  const Meshes meshes = Connected(2, errors, "another token", std::chrono::seconds(1));
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(errors[rank].find("this run's token") != std::string::npos, errors[rank]);
    CHECK(errors[rank].find("worker " + std::to_string(1 - rank)) == 0, errors[rank]);
  }
  CHECK(meshes[0]->dropped() > 0, "the connection of worker 1");
}

TEST(AnAddressOfAnotherMachineIsRefused) {
  std::string message;
  try {
    const Mesh mesh(0, {"a", "b"}, "192.0.2.1", "token", std::chrono::seconds(1), workers::kSilence);
  } catch (const std::exception& error) {
    message = error.what();
  }
  CHECK(message.find("192.0.2.1") != std::string::npos, message);
}

}  // namespace
