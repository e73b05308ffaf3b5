#include "tfpar_ops/transport/coded_exchange.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "tfpar_ops/core/layout.h"
#include "tfpar_ops/transport/running_call.h"

namespace tfpar {
namespace {

// Number of chunks of a shard that are in memory, for each member and direction.
constexpr int kWindow = 4;
// How many chunks after it was encoded a chunk is summed, and how many after it was encoded the others' sums of it are decoded:
// the messages are sent in between. The first is less than the window, and the second less than two windows after the first,
// or members could wait for each other.
constexpr int kSumLag = kWindow - 1;
constexpr int kDecodeLag = 2 * kSumLag;
constexpr int kParts = 0, kResults = 1;  // phases

}  // namespace

// Each member goes through the chunks of all shards in the same order: it encodes chunk k for each owner and sends it, sums
// chunk k - kSumLag of its own shard, encodes the sums again and sends them to all, and decodes chunk k - kDecodeLag of the
// others. So it waits only for work that the others do before they reach the same point.
class RunningCall::Pipeline {
 public:
  explicit Pipeline(RunningCall& call)
      : call_(call), exchange_(*call.call_.coded), codec_(exchange_.codec), owner_codec_(codec_), place_(call.call_.place) {
    owner_codec_.seed = exchange_.owner_seed;
    chunk_ = exchange_.chunk;
    if (chunk_ == 0) {
      const int64_t bytes = tfpar_payload_bytes(&codec_, exchange_.shard);
      const int64_t chunks = std::max<int64_t>(1, (bytes + kChunkBytes / 2) / kChunkBytes);  // of about the same size
      chunk_ = (exchange_.shard / chunks / kUnitElements + 1) * kUnitElements;
    }
    slot_bytes_ = (tfpar_payload_bytes(&codec_, std::min(chunk_, exchange_.shard)) + 63) / 64 * 64;
    slots_ = static_cast<int>(std::min<int64_t>(kWindow, chunks(0)));
    units_ = (exchange_.shard + kUnitElements - 1) / kUnitElements;
    if (exchange_.measures_norms) partial_norms_.resize(2 * units_ * call_.size());
    x_ = {exchange_.inputs.data(), exchange_.offsets.data(), static_cast<int64_t>(exchange_.inputs.size())};
    out_ = {exchange_.outputs.data(), exchange_.offsets.data(), static_cast<int64_t>(exchange_.outputs.size())};
    own_parts_ = Memory();
    own_results_ = Memory();
    for (int turn = 1; turn < call_.size(); ++turn) {  // every member begins with a different one
      Peer peer{};
      peer.place = (place_ + turn) % call_.size();
      peer.sent_parts = NewRing(peer.place, Memory());
      peer.parts = NewRing(peer.place, Memory());
      peer.sent_results = NewRing(peer.place, own_results_);
      peer.results = NewRing(peer.place, Memory());
      peers_.push_back(peer);
    }
  }

  void Run() {
    for (Peer& peer : peers_) {
      for (int number = 0; number < slots_; ++number) {
        Receive(peer.parts, kParts, place_, number);
        Receive(peer.results, kResults, peer.place, number);
      }
    }
    const int64_t all = chunks(0);  // no shard has more
    for (int64_t step = 0; step < all + kDecodeLag; ++step) {
      Encode(step);
      Sum(step - kSumLag);
      Decode(step - kDecodeLag);
    }
    for (Peer& peer : peers_) {
      call_.WaitSends(*peer.sent_parts.port);
      call_.WaitSends(*peer.sent_results.port);
    }
    if (!exchange_.measures_norms) {
      exchange_.norms[0] = exchange_.norms[1] = std::numeric_limits<float>::quiet_NaN();
      return;
    }
    double sums[2] = {0, 0};
    for (size_t i = 0; i < partial_norms_.size(); ++i) sums[i % 2] += partial_norms_[i];
    exchange_.norms[0] = static_cast<float>(sums[0]);
    exchange_.norms[1] = exchange_.worker_residual != nullptr ? static_cast<float>(sums[1]) : 0.0f;
  }

 private:
  // Memory of one window of chunks, each in the place of the chunk one window before it, and the messages from or to it.
  struct Ring {
    char* memory;
    Port* port;
  };

  struct Peer {
    int place;
    Ring sent_parts, parts, sent_results, results;
  };

  // Of a unit's blocks.
  struct Norms {
    double values[2 * kUnitElements / 64];
  };

  char* Memory() { return call_.Memory(slots_ * slot_bytes_); }

  Ring NewRing(int place, char* memory) { return {memory, &call_.AddPort(place, memory, slots_ * slot_bytes_)}; }

  // Elements of the shard of a place; and the same, up to the end of the last block.
  int64_t valid(int place) const {
    return std::clamp<int64_t>(exchange_.total - place * exchange_.shard, 0, exchange_.shard);
  }
  int64_t whole(int place) const { return NumBlocks(codec_, valid(place)) * codec_.block; }
  int64_t chunks(int place) const { return (whole(place) + chunk_ - 1) / chunk_; }
  bool has(int place, int64_t number) const { return number >= 0 && number < chunks(place); }
  int64_t elements(int place, int64_t number) const { return std::min(chunk_, whole(place) - number * chunk_); }

  size_t slot(int64_t number) const { return number % kWindow * slot_bytes_; }
  char* payload(const Ring& ring, int64_t number) const { return ring.memory + slot(number); }
  char* own_part(int64_t number) const { return own_parts_ + slot(number); }
  char* own_result(int64_t number) const { return own_results_ + slot(number); }

  void Receive(const Ring& ring, int phase, int owner, int64_t number) {
    if (!has(owner, number)) return;
    call_.Receive(*ring.port, phase, slot(number) + kHeaderBytes, MessageBytes(owner, number));
  }

  void Send(const Ring& ring, int phase, int owner, int64_t number) {
    call_.Send(*ring.port, phase, slot(number) + kHeaderBytes, MessageBytes(owner, number));
  }

  // Messages of a ring are sent in order: the one that completes is the oldest.
  void WaitForRoom(const Ring& ring) {
    while (ring.port->sends >= kWindow) call_.WaitSend(*ring.port);
  }

  size_t MessageBytes(int owner, int64_t number) const {
    return PaddingAt(codec_, elements(owner, number)) - kHeaderBytes;
  }

  // Of this call, in which it may compute and send, but not wait for others.
  Turns::Turn Turn() const { return {call_.mesh_.turns_, call_.call_.turn, exchange_.threads}; }

  void ForEach(int64_t n, const std::function<void(int64_t)>& work) const {
    const int64_t units = (n + kUnitElements - 1) / kUnitElements;
    if (exchange_.for_each && units > 1) return exchange_.for_each(units, work);
    for (int64_t unit = 0; unit < units; ++unit) work(unit);
  }

  int64_t first_block(int64_t unit) const { return unit * (kUnitElements / codec_.block); }
  int64_t last_block(int64_t unit, int64_t n) const { return std::min(first_block(unit + 1), NumBlocks(codec_, n)); }

  void Encode(int64_t number) {
    if (number >= chunks(0)) return;
    for (Peer& peer : peers_) WaitForRoom(peer.sent_parts);
    const Turns::Turn turn = Turn();
    for (Peer& peer : peers_) {
      if (!has(peer.place, number)) continue;
      EncodeChunk(peer.place, number, payload(peer.sent_parts, number));
      Send(peer.sent_parts, kParts, peer.place, number);
    }
    if (has(place_, number)) EncodeChunk(place_, number, own_part(number));
  }

  void EncodeChunk(int owner, int64_t number, char* to) {
    const int64_t n = elements(owner, number), begin = owner * exchange_.shard + number * chunk_;
    const float* residual = exchange_.worker_residual;
    ForEach(n, [&](int64_t unit) {
      const int64_t first = first_block(unit), last = last_block(unit, n);
      Norms norms;
      tfpar_encode(&codec_, &x_, begin, n, residual ? residual + begin : nullptr,
                   residual ? exchange_.new_worker_residual + begin : nullptr, to, first, last,
                   exchange_.measures_norms ? norms.values : nullptr);
      if (!exchange_.measures_norms) return;
      double sums[2] = {0, 0};
      for (int64_t i = 0; i < 2 * (last - first); ++i) sums[i % 2] += norms.values[i];
      const int64_t at = owner * units_ + number * (chunk_ / kUnitElements) + unit;
      partial_norms_[2 * at] = sums[0];
      partial_norms_[2 * at + 1] = sums[1];
    });
  }

  void Sum(int64_t number) {
    if (!has(place_, number)) return;
    std::vector<const void*> parts(call_.size());
    parts[place_] = own_part(number);
    for (Peer& peer : peers_) {
      call_.WaitReceive(*peer.parts.port);
      parts[peer.place] = payload(peer.parts, number);
      WaitForRoom(peer.sent_results);
    }
    const int64_t n = elements(place_, number), at = number * chunk_, begin = place_ * exchange_.shard + at;
    const int64_t exist = std::min(n, valid(place_) - at);
    const float* residual = exchange_.owner_residual;
    const Turns::Turn turn = Turn();
    ForEach(n, [&](int64_t unit) {
      tfpar_recode(&owner_codec_, n, parts.data(), call_.size(), 1.0f, exist, begin, residual ? residual + at : nullptr,
                   residual ? exchange_.new_owner_residual + at : nullptr, own_result(number), first_block(unit),
                   last_block(unit, n), /*norms=*/nullptr);
    });
    for (Peer& peer : peers_) {
      Send(peer.sent_results, kResults, place_, number);
      Receive(peer.parts, kParts, place_, number + kWindow);
    }
    DecodeChunk(place_, number, own_result(number));
  }

  void Decode(int64_t number) {
    for (Peer& peer : peers_) {
      if (!has(peer.place, number)) continue;
      call_.WaitReceive(*peer.results.port);
      const Turns::Turn turn = Turn();
      DecodeChunk(peer.place, number, payload(peer.results, number));
      Receive(peer.results, kResults, peer.place, number + kWindow);
    }
  }

  void DecodeChunk(int owner, int64_t number, const void* from) {
    const int64_t n = elements(owner, number), begin = owner * exchange_.shard + number * chunk_;
    ForEach(n, [&](int64_t unit) {
      tfpar_decode_sum(&codec_, n, &from, 1, 1.0f, &out_, begin, first_block(unit), last_block(unit, n));
    });
  }

  RunningCall& call_;
  CodedExchange& exchange_;
  const tfpar_codec codec_;
  tfpar_codec owner_codec_;
  const int place_;
  tfpar_vector x_{};
  tfpar_mutable_vector out_{};
  int64_t chunk_ = 0, units_ = 0;
  size_t slot_bytes_ = 0;
  int slots_ = 0;
  char *own_parts_ = nullptr, *own_results_ = nullptr;
  std::vector<Peer> peers_;
  std::vector<double> partial_norms_;  // by shard and unit
};

void RunningCall::Coded() {
  if (call_.coded->total == 0) return;
  Pipeline pipeline(*this);
  Register();
  pipeline.Run();
}

}  // namespace tfpar
