// Assigns processors to the calls of a mesh, earlier calls first: while they send, later ones compute.
// If all calls computed at the same time, they would all send at the end, and the link would be idle before.
#ifndef TFPAR_OPS_TRANSPORT_TURNS_H_
#define TFPAR_OPS_TRANSPORT_TURNS_H_

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace tfpar {

class Turns {
 public:
  // A number for a call; smaller numbers go first.
  int64_t NextNumber() {
    std::lock_guard<std::mutex> lock(mutex_);
    return next_++;
  }

  // Waits until fewer than `limit` calls compute and no earlier one waits. The turn lasts until the object is destroyed; its
  // call must not wait for other workers during the turn.
  class Turn {
   public:
    Turn(Turns& turns, int64_t number, int limit) : turns_(turns) {
      std::unique_lock<std::mutex> lock(turns_.mutex_);
      if (turns_.computing_ >= limit || !turns_.waiting_.empty()) {
        const auto own = std::make_shared<Waiter>();
        own->limit = limit;
        turns_.waiting_.emplace(number, own);
        own->next.wait(lock, [&] { return turns_.First() == own; });
        turns_.waiting_.erase(number);
      }
      ++turns_.computing_;
      turns_.WakeFirst(lock);
    }
    ~Turn() {
      std::unique_lock<std::mutex> lock(turns_.mutex_);
      --turns_.computing_;
      turns_.WakeFirst(lock);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Turns& turns_;
  };

 private:
  struct Waiter {
    std::condition_variable next;
    int limit = 1;
  };

  // The one that may compute; null for none.
  std::shared_ptr<Waiter> First() const {
    if (waiting_.empty() || computing_ >= waiting_.begin()->second->limit) return nullptr;
    return waiting_.begin()->second;
  }

  // Wakes one thread at most, and only once it can take the mutex: many threads wait, for few processors.
  void WakeFirst(std::unique_lock<std::mutex>& lock) {
    const std::shared_ptr<Waiter> first = First();
    lock.unlock();
    if (first) first->next.notify_one();
  }

  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<Waiter>> waiting_;  // by the number of the call
  int64_t next_ = 0;
  int computing_ = 0;
};

}  // namespace tfpar

#endif  // TFPAR_OPS_TRANSPORT_TURNS_H_
