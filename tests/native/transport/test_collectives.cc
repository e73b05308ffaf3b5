// Collectives and messages between the workers of a mesh.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "../check.h"
#include "tfpar_ops/transport/mesh.h"
#include "workers.h"

namespace {

using tfpar::Call;
using tfpar::Collective;
using tfpar::Outcome;
using workers::Connected;
using workers::Meshes;
using workers::Random;
using workers::Same;
using workers::SumCall;
using workers::Together;
using workers::Waiting;

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
          const size_t share = (size + members.size() - 1) / members.size();
          inputs.push_back(Random(size, rank * 100 + size % 97 + turn));
          results.push_back(std::vector<float>(share, 7.f));
          std::vector<float> own(share);
          for (size_t j = 0; j < share && place * share + j < size; ++j) own[j] = sum[place * share + j];
          Call scatter = SumCall(Collective::kReduceScatter, members, place, key + 1, inputs.back().data(),
                                 results.back().data(), share);
          scatter.in_bytes = size * sizeof(float);
          waiting.Start(*meshes[rank], scatter);
          expected.push_back(own);
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

// Keys are hashes of members with 31 bits. Worker 1 begins with the call of the other group.
TEST(GroupsWithTheSameKeyDoNotMix) {
  const Meshes meshes = Connected(3);
  const std::vector<int> pair = {0, 1}, all = {0, 1, 2};
  const std::vector<float> ones(4, 1.f), tens(4, 10.f);
  std::vector<std::vector<float>> sums(5, std::vector<float>(4));
  Waiting waiting;
  waiting.Start(*meshes[1], SumCall(Collective::kAllReduce, all, 1, 1, tens.data(), sums[0].data(), 4));
  while (meshes[1]->WaitingMs() < 20) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  waiting.Start(*meshes[0], SumCall(Collective::kAllReduce, pair, 0, 1, ones.data(), sums[1].data(), 4));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  waiting.Start(*meshes[1], SumCall(Collective::kAllReduce, pair, 1, 1, ones.data(), sums[2].data(), 4));
  waiting.Start(*meshes[0], SumCall(Collective::kAllReduce, all, 0, 1, tens.data(), sums[3].data(), 4));
  waiting.Start(*meshes[2], SumCall(Collective::kAllReduce, all, 2, 1, tens.data(), sums[4].data(), 4));
  for (const Outcome& outcome : waiting.Wait()) CHECK(outcome.kind == Outcome::kDone, outcome.message);
  for (int i = 0; i < 5; ++i) {
    const float expected = i == 1 || i == 2 ? 2.f : 30.f;
    CHECK(Same(sums[i], std::vector<float>(4, expected)), std::to_string(i) + ": " + std::to_string(sums[i][0]));
  }
}

}  // namespace
