// The mesh of the transport: several workers in one process, each with its own threads, over sockets of 127.0.0.1.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "tfpar_ops/core/codec.h"
#include "tfpar_ops/transport/coded_exchange.h"
#include "tfpar_ops/transport/mesh.h"

// Gloo 0.5 leaks the result of the address lookup if it finds no address.
extern "C" const char* __lsan_default_suppressions() { return "leak:gloo::transport::tcp::CreateDeviceAttr\n"; }

// A buffer's destructor waits until Gloo's own thread has released it, using the counts of a shared_ptr in the library
// (gloo/common/memory.h). The sanitizer does not see this, because the library is not built with it.
extern "C" const char* __tsan_default_suppressions() { return "race:gloo::transport::tcp::UnboundBuffer::\n"; }

namespace {

using tfpar::Call;
using tfpar::CodedExchange;
using tfpar::Collective;
using tfpar::Mesh;
using tfpar::Outcome;

using Meshes = std::vector<std::unique_ptr<Mesh>>;

void Together(int size, const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(work, rank);
  for (std::thread& thread : threads) thread.join();
}

// Connects workers and puts their errors in `errors`.
Meshes Connected(int size, std::vector<std::string>& errors, const std::string& other_token = "token",
                 std::chrono::seconds timeout = std::chrono::seconds(30)) {
  Meshes meshes;
  std::vector<std::string> names, addresses;
  for (int rank = 0; rank < size; ++rank) names.push_back("worker " + std::to_string(rank));
  for (int rank = 0; rank < size; ++rank) {
    const std::string token = rank == size - 1 ? other_token : "token";
    meshes.push_back(std::make_unique<Mesh>(rank, names, "127.0.0.1", token, timeout));
    addresses.push_back(meshes.back()->address());
  }
  errors.assign(size, "");
  Together(size, [&](int rank) {
    try {
      meshes[rank]->Connect(addresses);
    } catch (const std::exception& error) {
      errors[rank] = error.what();
    }
  });
  return meshes;
}

Meshes Connected(int size) {
  std::vector<std::string> errors;
  Meshes meshes = Connected(size, errors);
  for (const std::string& error : errors) CHECK(error.empty(), error);
  return meshes;
}

// Waits for calls that were started.
class Waiting {
 public:
  void Start(Mesh& mesh, Call call) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++open_;
    }
    call.done = [this](const Outcome& outcome) {
      std::lock_guard<std::mutex> lock(mutex_);
      outcomes_.push_back(outcome);
      if (--open_ == 0) none_.notify_all();
    };
    mesh.Start(std::move(call));
  }

  std::vector<Outcome> Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    none_.wait(lock, [this] { return open_ == 0; });
    return std::move(outcomes_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable none_;
  int open_ = 0;
  std::vector<Outcome> outcomes_;
};

void AddFloats(void* sum, const void* x, size_t n) {
  for (size_t i = 0; i < n; ++i) static_cast<float*>(sum)[i] += static_cast<const float*>(x)[i];
}

std::vector<float> Random(size_t n, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) value = normal(generator);
  return values;
}

Call SumCall(Collective collective, const std::vector<int>& members, int place, uint64_t key, const float* in, float* out,
             size_t elements) {
  Call call;
  call.collective = collective;
  call.members = members;
  call.place = place;
  call.key = key;
  call.in = in;
  call.out = out;
  call.bytes = elements * sizeof(float);
  call.element_bytes = sizeof(float);
  call.add = AddFloats;
  return call;
}

bool Same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// All groups and sizes at once, each several times with the same key.
TEST(SumsHaveTheSameBitsOnAllMembers) {
  const Meshes meshes = Connected(4);
  const std::vector<std::vector<int>> groups = {{0, 1, 2, 3}, {1, 3}, {0, 2, 3}};
  const std::vector<size_t> sizes = {0, 1, 3, 1000, 300000, 1100001};
  Together(4, [&](int rank) {
    for (int turn = 0; turn < 2; ++turn) {
      Waiting waiting;
      std::vector<std::vector<float>> results, expected;
      std::vector<std::vector<float>> inputs;
      uint64_t key = 0;
      results.reserve(64);
      inputs.reserve(64);
      for (const auto& members : groups) {
        int place = -1;
        for (size_t i = 0; i < members.size(); ++i) place = members[i] == rank ? static_cast<int>(i) : place;
        for (const size_t size : sizes) {
          key += 2;
          if (place < 0) continue;
          std::vector<float> sum = Random(size, members[0] * 100 + size % 97 + turn);
          for (size_t i = 1; i < members.size(); ++i) {
            const std::vector<float> next = Random(size, members[i] * 100 + size % 97 + turn);
            for (size_t j = 0; j < size; ++j) sum[j] += next[j];
          }
          inputs.push_back(Random(size, rank * 100 + size % 97 + turn));
          // Both in place and not in place.
          results.push_back(turn ? inputs.back() : std::vector<float>(size));
          float* out = results.back().data();
          const float* in = turn ? out : inputs.back().data();
          waiting.Start(*meshes[rank], SumCall(Collective::kAllReduce, members, place, key, in, out, size));
          expected.push_back(sum);
          const size_t rows = size / members.size();
          inputs.push_back(Random(rows * members.size(), rank * 100 + size % 97 + turn));
          results.push_back(std::vector<float>(rows));
          std::vector<float> row(rows);
          for (size_t i = 0; i < members.size(); ++i) {
            const std::vector<float> all = Random(rows * members.size(), members[i] * 100 + size % 97 + turn);
            for (size_t j = 0; j < rows; ++j) row[j] = i ? row[j] + all[place * rows + j] : all[place * rows + j];
          }
          waiting.Start(*meshes[rank], SumCall(Collective::kReduceScatter, members, place, key + 1,
                                               inputs.back().data(), results.back().data(), rows));
          expected.push_back(row);
        }
      }
      for (const Outcome& outcome : waiting.Wait()) CHECK(outcome.kind == Outcome::kDone, outcome.message);
      for (size_t i = 0; i < results.size(); ++i) {
        CHECK(Same(results[i], expected[i]), "rank " + std::to_string(rank) + ", result " + std::to_string(i));
      }
    }
  });
}

TEST(RowsArriveWhereTheyBelong) {
  constexpr int kSize = 3;
  const Meshes meshes = Connected(kSize);
  Together(kSize, [&](int rank) {
    for (const size_t elements : {size_t{1}, size_t{700000}}) {
      Waiting waiting;
      std::vector<float> rows(elements * kSize), swapped(rows.size()), row(elements, 10.f + rank), gathered(rows.size());
      for (int to = 0; to < kSize; ++to) std::fill_n(rows.begin() + to * elements, elements, 10.f * rank + to);
      std::vector<float> value(elements, 5.f + rank), sent(elements, 70.f + rank), received(elements);
      const std::vector<int> all = {0, 1, 2};
      waiting.Start(*meshes[rank],
                    SumCall(Collective::kAllToAll, all, rank, 1, rows.data(), swapped.data(), elements));
      waiting.Start(*meshes[rank],
                    SumCall(Collective::kAllGather, all, rank, 2, row.data(), gathered.data(), elements));
      Call broadcast = SumCall(Collective::kBroadcast, all, rank, 3, value.data(), value.data(), elements);
      broadcast.peer = 1;
      waiting.Start(*meshes[rank], broadcast);
      Call send = SumCall(Collective::kSend, all, rank, 4, sent.data(), nullptr, elements);
      send.peer = (rank + 1) % kSize;
      waiting.Start(*meshes[rank], send);
      Call receive = SumCall(Collective::kReceive, all, rank, 4, nullptr, received.data(), elements);
      receive.peer = (rank + 2) % kSize;
      waiting.Start(*meshes[rank], receive);
      waiting.Start(*meshes[rank], SumCall(Collective::kBarrier, all, rank, 5, nullptr, nullptr, 0));
      for (const Outcome& outcome : waiting.Wait()) CHECK(outcome.kind == Outcome::kDone, outcome.message);
      for (int from = 0; from < kSize; ++from) {
        const size_t last = (from + 1) * elements - 1;
        CHECK(swapped[last] == 10.f * from + rank, std::to_string(swapped[last]));
        CHECK(gathered[last] == 10.f + from, std::to_string(gathered[last]));
      }
      CHECK(value[elements - 1] == 6.f, std::to_string(value[elements - 1]));
      CHECK(received[elements - 1] == 70.f + (rank + 2) % kSize, std::to_string(received[elements - 1]));
    }
  });
}

tfpar_codec CodecOf(int32_t kind, bool stochastic) {
  tfpar_codec codec{};
  codec.kind = kind;
  codec.block = kind <= 2 ? 1024 : 512;
  codec.scale_bits = kind >= 4 ? 16 : 0;
  codec.stochastic = stochastic;
  codec.step = 7;
  return codec;
}

// One member's data in an exchange: two tensors, two residuals.
struct Member {
  std::vector<float> first, second, out_first, out_second, worker, owner;

  Member(size_t total, size_t cut, size_t owned, int rank, bool feedback) {
    const std::vector<float> all = Random(total, 10 + rank);
    first.assign(all.begin(), all.begin() + cut);
    second.assign(all.begin() + cut, all.end());
    out_first.resize(first.size());
    out_second.resize(second.size());
    if (feedback) worker = Random(total, 20 + rank);
    if (feedback) owner = Random(owned, 30 + rank);
  }

  CodedExchange Exchange(const tfpar_codec& codec, int rank, int64_t shard, bool in_place) {
    CodedExchange result;
    result.codec = codec;
    result.codec.seed = 2 * rank;
    result.owner_seed = 2 * rank + 1;
    result.inputs = {first.data(), second.data()};
    result.outputs = {in_place ? first.data() : out_first.data(), in_place ? second.data() : out_second.data()};
    const auto total = static_cast<int64_t>(first.size() + second.size());
    result.offsets = {0, static_cast<int64_t>(first.size()), total};
    result.total = total;
    result.shard = shard;
    result.chunk = tfpar::kUnitElements;
    result.worker_residual = worker.empty() ? nullptr : worker.data();
    result.new_worker_residual = worker.data();
    result.owner_residual = owner.empty() ? nullptr : owner.data();
    result.new_owner_residual = owner.data();
    return result;
  }

  std::vector<float> Result(bool in_place) const {
    std::vector<float> all = in_place ? first : out_first;
    const std::vector<float>& rest = in_place ? second : out_second;
    all.insert(all.end(), rest.begin(), rest.end());
    return all;
  }
};

// The result of the same exchange with whole shards, step by step; updates the residuals.
std::vector<float> ByWholeShards(const tfpar_codec& codec, int64_t shard, std::vector<Member>& members) {
  const int size = static_cast<int>(members.size());
  const auto total = static_cast<int64_t>(members[0].first.size() + members[0].second.size());
  const int64_t blocks = tfpar_num_blocks(&codec, shard);
  const size_t bytes = tfpar_payload_bytes(&codec, shard);
  std::vector<std::vector<char>> parts(size * size, std::vector<char>(bytes));
  std::vector<float> result(total);
  for (int rank = 0; rank < size; ++rank) {
    Member& member = members[rank];
    const CodedExchange plan = member.Exchange(codec, rank, shard, false);
    const tfpar_vector x = {plan.inputs.data(), plan.offsets.data(), 2};
    for (int owner = 0; owner < size; ++owner) {
      const int64_t begin = owner * shard;
      float* residual = member.worker.empty() ? nullptr : member.worker.data() + std::min(begin, total);
      tfpar_encode(&plan.codec, &x, begin, shard, residual, residual, parts[owner * size + rank].data(), 0, blocks, nullptr);
    }
  }
  for (int owner = 0; owner < size; ++owner) {
    tfpar_codec again = codec;
    again.seed = 2 * owner + 1;
    const int64_t begin = owner * shard, exist = std::clamp<int64_t>(total - begin, 0, shard);
    std::vector<const void*> payloads;
    for (int rank = 0; rank < size; ++rank) payloads.push_back(parts[owner * size + rank].data());
    std::vector<char> sum(bytes);
    float* residual = members[owner].owner.empty() ? nullptr : members[owner].owner.data();
    tfpar_recode(&again, shard, payloads.data(), size, 1.0f, exist, begin, residual, residual, sum.data(), 0, blocks, nullptr);
    float* data = result.data();
    const int64_t offsets[2] = {0, total};
    const tfpar_mutable_vector out = {&data, offsets, 1};
    const void* from = sum.data();
    tfpar_decode_sum(&codec, shard, &from, 1, 1.0f, &out, begin, 0, blocks);
  }
  return result;
}

void CheckExchange(const Meshes& meshes, const tfpar_codec& codec, size_t total, int turn) {
  const int size = static_cast<int>(meshes.size());
  const int64_t blocks = (static_cast<int64_t>(total) + codec.block - 1) / codec.block;
  const int64_t shard = (blocks + size - 1) / size * codec.block;
  const bool feedback = turn % 3 != 2, in_place = turn % 2 == 1;
  std::vector<Member> members;
  std::vector<int> all;
  for (int rank = 0; rank < size; ++rank) {
    const auto owned = std::clamp<int64_t>(static_cast<int64_t>(total) - rank * shard, 0, shard);
    members.emplace_back(total, total / 3, owned, rank, feedback);
    all.push_back(rank);
  }
  if (total > 50 && turn % 4 == 3) members[size - 1].first[7] = std::numeric_limits<float>::infinity();
  std::vector<Member> whole = members;
  const std::vector<float> expected = ByWholeShards(codec, shard, whole);
  Together(size, [&](int rank) {
    Waiting waiting;
    Call call;
    call.collective = Collective::kCodedExchange;
    call.members = all;
    call.place = rank;
    call.key = 77;
    call.coded = std::make_shared<CodedExchange>(members[rank].Exchange(codec, rank, shard, in_place));
    call.coded->threads = 1 + turn % 2;
    call.bytes = total;
    if (turn % 2 == 0) {
      call.coded->for_each = [](int64_t units, const std::function<void(int64_t)>& work) {
        Together(2, [&](int half) {
          for (int64_t unit = half; unit < units; unit += 2) work(unit);
        });
      };
    }
    waiting.Start(*meshes[rank], std::move(call));
    for (const Outcome& outcome : waiting.Wait()) CHECK(outcome.kind == Outcome::kDone, outcome.message);
    const std::string what = "kind " + std::to_string(codec.kind) + ", total " + std::to_string(total) + ", rank " +
                             std::to_string(rank);
    CHECK(Same(members[rank].Result(in_place), expected), what);
    CHECK(Same(members[rank].worker, whole[rank].worker), what);
    CHECK(Same(members[rank].owner, whole[rank].owner), what);
  });
}

// Chunks of one unit, so that windows are used up, in shards of many, of few and of none.
TEST(AnExchangeInChunksHasTheBitsOfWholeShards) {
  for (const int size : {2, 3, 4}) {
    const Meshes meshes = Connected(size);
    int turn = 0;
    for (const size_t total : {size_t{0}, size_t{1}, size_t{513}, size_t{200001}, size_t{1300000}}) {
      for (const int32_t kind : {1, 2, 3, 4, 5, 6, 7}) {
        if (total > 500000 && kind != 1 + size && kind != 5) continue;
        CheckExchange(meshes, CodecOf(kind, kind >= 4 && kind <= 6 && turn % 5 < 2), total, turn);
        ++turn;
      }
    }
  }
}

TEST(ALostWorkerEndsAnExchange) {
  Meshes meshes = Connected(3);
  const tfpar_codec codec = CodecOf(5, false);
  const size_t total = 3000000;
  const int64_t shard = (total / codec.block / 3 + 1) * codec.block;
  std::vector<Member> members;
  for (int rank = 0; rank < 3; ++rank) members.emplace_back(total, total / 3, 1, rank, false);
  Waiting waiting;
  for (const int rank : {0, 1}) {
    Call call;
    call.collective = Collective::kCodedExchange;
    call.members = {0, 1, 2};
    call.place = rank;
    call.key = 5;
    call.bytes = total;
    call.coded = std::make_shared<CodedExchange>(members[rank].Exchange(codec, rank, shard, false));
    waiting.Start(*meshes[rank], std::move(call));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  meshes[2].reset();
  const std::vector<Outcome> outcomes = waiting.Wait();
  CHECK(outcomes.size() == 2, std::to_string(outcomes.size()));
  for (const Outcome& outcome : outcomes) {
    CHECK(outcome.kind == Outcome::kLost, outcome.message);
    CHECK(outcome.message.find("lost worker 2: ") == 0, outcome.message);
  }
}

TEST(ACallThatIsRefusedDoesNotBegin) {
  const Meshes meshes = Connected(2);
  Waiting waiting;
  Call call;
  call.members = {0, 1};
  call.prepare = [] { return Outcome{Outcome::kRefused, "no variable"}; };
  waiting.Start(*meshes[0], std::move(call));
  const Outcome outcome = waiting.Wait()[0];
  CHECK(outcome.kind == Outcome::kRefused && outcome.message == "no variable", outcome.message);
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
    const Mesh mesh(0, {"a", "b"}, "192.0.2.1", "token", std::chrono::seconds(1));
  } catch (const std::exception& error) {
    message = error.what();
  }
  CHECK(message.find("192.0.2.1") != std::string::npos, message);
}

}  // namespace

int main(int argc, char** argv) {
  int run = 0;
  for (const check::Test& test : check::Tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    const int before = check::Failures();
    test.run();
    std::printf("  %-45s %s\n", test.name, check::Failures() == before ? "ok" : "FAILED");
    std::fflush(stdout);
    ++run;
  }
  std::printf("%d tests, %d failed checks\n", run, check::Failures());
  return check::Failures() == 0 && run > 0 ? 0 : 1;
}
