// Memory of ended calls, reused by later ones: the system clears fresh memory, which costs more than the work done in it.
#ifndef TFPAR_OPS_TRANSPORT_SPARE_MEMORY_H_
#define TFPAR_OPS_TRANSPORT_SPARE_MEMORY_H_

#include <cstddef>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

namespace tfpar {

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
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = spare_.lower_bound(bytes);
      if (found != spare_.end() && found->first < 2 * bytes + kLine) {
        Block block = std::move(found->second);
        spare_.erase(found);
        spare_bytes_ -= block.bytes;
        return block;
      }
    }
    const size_t whole = (bytes + kLine) / kLine * kLine;
    Block block{whole, std::unique_ptr<char[], Free>(static_cast<char*>(std::aligned_alloc(kLine, whole)))};
    if (!block.data) throw std::bad_alloc();
    return block;
  }

  // Keeps the block, unless much memory is kept already.
  void Return(Block block) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (spare_bytes_ + block.bytes > kMost) return;
    spare_bytes_ += block.bytes;
    const size_t bytes = block.bytes;
    spare_.emplace(bytes, std::move(block));
  }

 private:
  static constexpr size_t kLine = 64;
  static constexpr size_t kMost = size_t{64} << 20;
  std::mutex mutex_;
  std::multimap<size_t, Block> spare_;  // by size
  size_t spare_bytes_ = 0;
};

}  // namespace tfpar

#endif  // TFPAR_OPS_TRANSPORT_SPARE_MEMORY_H_
