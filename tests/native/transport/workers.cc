#include "workers.h"

#include <cstring>
#include <exception>
#include <random>
#include <thread>
#include <utility>

#include "../check.h"

namespace workers {

using tfpar::Call;
using tfpar::Collective;
using tfpar::Mesh;
using tfpar::Outcome;

namespace {

void AddFloats(void* sum, const void* x, size_t n) {
  for (size_t i = 0; i < n; ++i) static_cast<float*>(sum)[i] += static_cast<const float*>(x)[i];
}

}  // namespace

void Together(int size, const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(work, rank);
  for (std::thread& thread : threads) thread.join();
}

Meshes Connected(int size, std::vector<std::string>& errors, const std::string& other_token,
                 std::chrono::seconds timeout) {
  Meshes meshes;
  std::vector<std::string> names, addresses;
  for (int rank = 0; rank < size; ++rank) names.push_back("worker " + std::to_string(rank));
  for (int rank = 0; rank < size; ++rank) {
    const std::string token = rank == size - 1 ? other_token : "token";
    meshes.push_back(std::make_unique<Mesh>(rank, names, "127.0.0.1", token, timeout, kSilence));
    addresses.push_back(meshes.back()->address());
  }
  errors.assign(size, "");
  Together(size, [&](int rank) {
    try {
      meshes[rank]->Connect(addresses);
    } catch (const std::exception& error) {
      errors[rank] = error.what();
    }
  });
  return meshes;
}

Meshes Connected(int size) {
  std::vector<std::string> errors;
  Meshes meshes = Connected(size, errors);
  for (const std::string& error : errors) CHECK(error.empty(), error);
  return meshes;
}

void Waiting::Start(Mesh& mesh, Call call) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++open_;
  }
  call.done = [this](const Outcome& outcome) {
    std::lock_guard<std::mutex> lock(mutex_);
    outcomes_.push_back(outcome);
    if (--open_ == 0) none_.notify_all();
  };
  mesh.Start(std::move(call));
}

std::vector<Outcome> Waiting::Wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  none_.wait(lock, [this] { return open_ == 0; });
  return std::move(outcomes_);
}

Call SumCall(Collective collective, const std::vector<int>& members, int place, uint64_t key, const float* in, float* out,
             size_t elements) {
  Call call;
  call.collective = collective;
  call.members = members;
  call.place = place;
  call.key = key;
  call.in = in;
  call.out = out;
  call.bytes = elements * sizeof(float);
  call.element_bytes = sizeof(float);
  call.add = AddFloats;
  return call;
}

std::vector<float> Random(size_t n, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) value = normal(generator);
  return values;
}

bool Same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

}  // namespace workers
