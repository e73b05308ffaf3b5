// Threads that are kept for later tasks. A task never waits for the thread of another one: if all are busy, one is added.
// Where the system has no thread left, the task is refused.
#ifndef TFPAR_OPS_TRANSPORT_THREADS_H_
#define TFPAR_OPS_TRANSPORT_THREADS_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "tfpar_ops/transport/sigpipe.h"

namespace tfpar {

class Threads {
 public:
  Threads() = default;
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  // Returns when all tasks have ended.
  ~Threads() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
    }
    ready_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Returns why the task will not run; empty if it will.
  std::string Run(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (idle_ <= tasks_.size()) {
      try {
        const BlockedSigpipe blocked;
        threads_.emplace_back([this] { Work(); });
      } catch (const std::system_error& error) {
        return error.what();
      }
    }
    tasks_.push_back(std::move(task));
    ready_.notify_one();
    return "";
  }

  size_t size() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return threads_.size();
  }

 private:
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      ++idle_;
      ready_.wait(lock, [this] { return ending_ || !tasks_.empty(); });
      --idle_;
      if (tasks_.empty()) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  mutable std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace tfpar

#endif  // TFPAR_OPS_TRANSPORT_THREADS_H_
