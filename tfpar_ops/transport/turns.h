// Assigns processors to the calls of a mesh, earlier calls first: while they send, later ones compute.
// If all calls computed at the same time, they would all send at the end, and the link would be idle before.
#ifndef TFPAR_OPS_TRANSPORT_TURNS_H_
#define TFPAR_OPS_TRANSPORT_TURNS_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>

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
      turns_.waiting_.insert(number);
      turns_.free_.wait(lock, [&] { return turns_.computing_ < limit && *turns_.waiting_.begin() == number; });
      turns_.waiting_.erase(number);
      ++turns_.computing_;
      if (!turns_.waiting_.empty() && turns_.computing_ < limit) turns_.free_.notify_all();
    }
    ~Turn() {
      std::lock_guard<std::mutex> lock(turns_.mutex_);
      --turns_.computing_;
      if (!turns_.waiting_.empty()) turns_.free_.notify_all();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Turns& turns_;
  };

 private:
  std::mutex mutex_;
  std::condition_variable free_;
  std::set<int64_t> waiting_;
  int64_t next_ = 0;
  int computing_ = 0;
};

}  // namespace tfpar

#endif  // TFPAR_OPS_TRANSPORT_TURNS_H_
