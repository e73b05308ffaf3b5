// Parts of the transport by themselves: the turns of calls.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "../check.h"
#include "tfpar_ops/transport/turns.h"
#include "workers.h"

namespace {

using tfpar::Turns;

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
