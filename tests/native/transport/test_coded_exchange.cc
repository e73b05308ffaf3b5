// The coded exchange: in chunks it has the bits of whole shards, and it ends if a worker is lost.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../check.h"
#include "tfpar_ops/core/codec.h"
#include "tfpar_ops/transport/coded_exchange.h"
#include "tfpar_ops/transport/mesh.h"
#include "workers.h"

namespace {

using tfpar::Call;
using tfpar::CodedExchange;
using tfpar::Collective;
using tfpar::Outcome;
using workers::Connected;
using workers::Meshes;
using workers::Random;
using workers::Same;
using workers::Together;
using workers::Waiting;

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
    call.coded->measures_norms = turn % 4 < 2;
    const std::shared_ptr<CodedExchange> exchange = call.coded;
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
    if (turn % 4 >= 2 && total > 0) CHECK(std::isnan(exchange->norms[0]) && std::isnan(exchange->norms[1]), what);
    if (turn % 4 < 2 && total > 0) CHECK(exchange->norms[0] > 0 && (exchange->norms[1] == 0 || feedback), what);
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

}  // namespace
