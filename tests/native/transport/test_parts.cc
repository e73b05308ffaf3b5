// Parts of the transport by themselves: the memory that calls reuse, and their turns.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../check.h"
#include "tfpar_ops/transport/spare_memory.h"
#include "tfpar_ops/transport/turns.h"
#include "workers.h"

namespace {

using tfpar::SpareMemory;
using tfpar::Turns;

// Takes blocks, all at the same time, and returns where they are.
std::vector<char*> TakeAndReturn(SpareMemory& memory, const std::vector<size_t>& sizes) {
  std::vector<SpareMemory::Block> blocks;
  std::vector<char*> places;
  for (const size_t size : sizes) blocks.push_back(memory.Take(size));
  for (SpareMemory::Block& block : blocks) places.push_back(block.data.get());
  for (SpareMemory::Block& block : blocks) memory.Return(std::move(block));
  std::sort(places.begin(), places.end());
  return places;
}

// More than a bound that does not know the calls would keep.
TEST(CallsReuseAllMemoryOfTheCallsBefore) {
  SpareMemory memory;
  const std::vector<size_t> sizes(12, size_t{10} << 20);
  const std::vector<char*> places = TakeAndReturn(memory, sizes);
  CHECK(TakeAndReturn(memory, sizes) == places, "other memory");
}

TEST(MemoryOfSizesThatNoCallTakesAnyMoreIsFreed) {
  SpareMemory memory;
  constexpr size_t kMiB = size_t{1} << 20;
  TakeAndReturn(memory, {100 * kMiB});
  for (size_t size = 2; size <= 40; size += size) TakeAndReturn(memory, {size * kMiB, size * kMiB});
  CHECK(memory.held_bytes() < 113 * kMiB, std::to_string(memory.held_bytes()));
  TakeAndReturn(memory, {32 * kMiB, 32 * kMiB});  // the latest remain
  CHECK(memory.held_bytes() > 64 * kMiB, std::to_string(memory.held_bytes()));
}

TEST(EarlierCallsComputeFirst) {
  Turns turns;
  std::vector<int64_t> order;
  std::vector<std::thread> threads;
  {
    const Turns::Turn first(turns, 0, 1);
    for (const int64_t number : {3, 1, 2}) {
      threads.emplace_back([&turns, &order, number] {
        const Turns::Turn turn(turns, number, 1);
        order.push_back(number);
      });
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(order == (std::vector<int64_t>{1, 2, 3}), "another order");
}

TEST(NoMoreCallsComputeThanMay) {
  Turns turns;
  std::atomic<int> computing{0}, most{0}, done{0};
  workers::Together(6, [&](int) {
    for (int turn = 0; turn < 500; ++turn, ++done) {
      const Turns::Turn own(turns, turns.NextNumber(), 2);
      int now = ++computing, seen = most;
      while (now > seen && !most.compare_exchange_weak(seen, now)) {
      }
      if (turn % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      --computing;
    }
  });
  CHECK(done == 3000 && most == 2, std::to_string(most));
}

}  // namespace
