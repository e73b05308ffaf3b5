// Memory of ended calls, reused by later ones: the system clears fresh memory, which costs more than the work done in it.
#ifndef TFPAR_OPS_TRANSPORT_SPARE_MEMORY_H_
#define TFPAR_OPS_TRANSPORT_SPARE_MEMORY_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

namespace tfpar {

// Keeps what calls have had at the same time, and an eighth more, since a call may get a block that is longer than it needs.
// Beyond that, the blocks that have been spare for longest are freed for new ones.
class SpareMemory {
 public:
  struct Free {
    void operator()(char* data) const { std::free(data); }
  };

  struct Block {
    size_t bytes = 0;
    std::unique_ptr<char[], Free> data;  // begins at a cache line
  };

  // A block of at least this many bytes, and less than twice as many.
  Block Take(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = spare_.lower_bound(bytes);
    if (found != spare_.end() && found->first < 2 * bytes + kLine) {
      Block block = std::move(found->second.block);
      spare_.erase(found);
      taken_bytes_ += block.bytes;
      return block;
    }
    const size_t whole = (bytes + kLine) / kLine * kLine;
    most_bytes_ = std::max(most_bytes_, taken_bytes_ + whole);
    while (held_bytes_ + whole > most_bytes_ + most_bytes_ / 8) FreeOldest();
    Block block{whole, std::unique_ptr<char[], Free>(static_cast<char*>(std::aligned_alloc(kLine, whole)))};
    if (!block.data) throw std::bad_alloc();
    taken_bytes_ += whole;
    held_bytes_ += whole;
    return block;
  }

  void Return(Block block) {
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t bytes = block.bytes;
    taken_bytes_ -= bytes;
    spare_.emplace(bytes, Spare{std::move(block), returned_++});
  }

  size_t held_bytes() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return held_bytes_;
  }

 private:
  static constexpr size_t kLine = 64;
  static constexpr size_t kLeast = size_t{64} << 20;

  struct Spare {
    Block block;
    uint64_t returned;  // in the order of the returns
  };

  void FreeOldest() {
    const auto oldest = std::min_element(spare_.begin(), spare_.end(), [](const auto& a, const auto& b) {
      return a.second.returned < b.second.returned;
    });
    held_bytes_ -= oldest->first;
    spare_.erase(oldest);
  }

  mutable std::mutex mutex_;
  std::multimap<size_t, Spare> spare_;  // by size
  uint64_t returned_ = 0;
  size_t taken_bytes_ = 0, held_bytes_ = 0;  // by calls; by them or here
  size_t most_bytes_ = kLeast;               // that calls have had at the same time, or little
};

}  // namespace tfpar

#endif  // TFPAR_OPS_TRANSPORT_SPARE_MEMORY_H_
