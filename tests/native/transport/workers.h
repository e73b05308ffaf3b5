// The workers of a mesh, all in one process, each with its own threads, over sockets of 127.0.0.1; and their calls.
#ifndef TFPAR_TESTS_NATIVE_TRANSPORT_WORKERS_H_
#define TFPAR_TESTS_NATIVE_TRANSPORT_WORKERS_H_

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tfpar_ops/transport/mesh.h"

namespace workers {

// Of their connections.
constexpr std::chrono::milliseconds kSilence{12000};

using Meshes = std::vector<std::unique_ptr<tfpar::Mesh>>;

// Calls `work` for every rank, each in its own thread, and waits for all.
void Together(int size, const std::function<void(int)>& work);

// Connects workers and puts their errors in `errors`.
Meshes Connected(int size, std::vector<std::string>& errors, const std::string& other_token = "token",
                 std::chrono::seconds timeout = std::chrono::seconds(30));
// Checks that there are no errors.
Meshes Connected(int size);

// Waits for calls that were started.
class Waiting {
 public:
  void Start(tfpar::Mesh& mesh, tfpar::Call call);
  std::vector<tfpar::Outcome> Wait();

 private:
  std::mutex mutex_;
  std::condition_variable none_;
  int open_ = 0;
  std::vector<tfpar::Outcome> outcomes_;
};

// A call whose elements are floats; where it sums, it adds them.
tfpar::Call SumCall(tfpar::Collective collective, const std::vector<int>& members, int place, uint64_t key,
                    const float* in, float* out, size_t elements);

std::vector<float> Random(size_t n, uint32_t seed);

// Whether all bits are the same.
bool Same(const std::vector<float>& a, const std::vector<float>& b);

}  // namespace workers

#endif  // TFPAR_TESTS_NATIVE_TRANSPORT_WORKERS_H_
