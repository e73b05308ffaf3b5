#include "tfpar_ops/transport/transport.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "tfpar_ops/transport/registry.h"
#include "tfpar_ops/transport/running_call.h"

namespace tfpar {
namespace {

struct OpenMesh {
  std::shared_ptr<Mesh> mesh;
  std::shared_future<void> ended;
  pid_t process = getpid();  // a forked one has no threads, and what closes its connections closes those of its parent
};

struct Meshes {
  std::mutex mutex;
  int64_t last = 0;
  std::map<int64_t, OpenMesh> by_number;
};

// Never destroyed: threads of TensorFlow may still use it while a process destroys its static objects.
Meshes& All() {
  static Meshes* meshes = new Meshes;
  return *meshes;
}

// A mesh that ends in a thread of its own. It waits for its calls, and each of these for TensorFlow's cancellation of it, which
// also holds the mesh (started_call.h): if the mesh ended there, both would wait forever.
OpenMesh EndingApart(std::unique_ptr<Mesh> mesh) {
  auto ended = std::make_shared<std::promise<void>>();
  const auto end = [ended](Mesh* mesh) {
    const auto work = [mesh, ended] {
      delete mesh;
      ended->set_value();
    };
    try {
      std::thread(work).detach();
    } catch (const std::system_error&) {  // no thread is left
      work();
    }
  };
  std::shared_future<void> future = ended->get_future().share();
  return {std::shared_ptr<Mesh>(mesh.release(), end), std::move(future)};
}

void Say(const std::exception& error, char* message, size_t size) {
  std::snprintf(message, size, "%s", WithoutPlace(error.what()).c_str());
}

}  // namespace

std::shared_ptr<Mesh> FindMesh(int64_t number) {
  Meshes& all = All();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_number.find(number);
  return found == all.by_number.end() || found->second.process != getpid() ? nullptr : found->second.mesh;
}

}  // namespace tfpar

using tfpar::All;
using tfpar::EndingApart;
using tfpar::FindMesh;
using tfpar::Mesh;
using tfpar::OpenMesh;

extern "C" {

int32_t tfpar_transport_abi_version(void) { return TFPAR_TRANSPORT_ABI_VERSION; }

int64_t tfpar_transport_listen(int32_t rank, int32_t size, const char* const* names, const char* host, const char* token,
                               int64_t timeout_ms, int64_t silence_ms, char* message, size_t message_size) {
  try {
    OpenMesh mesh = EndingApart(std::make_unique<Mesh>(rank, std::vector<std::string>(names, names + size), host, token,
                                                       std::chrono::milliseconds(timeout_ms),
                                                       std::chrono::milliseconds(silence_ms)));
    auto& all = All();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.by_number[++all.last] = std::move(mesh);
    return all.last;
  } catch (const std::exception& error) {
    tfpar::Say(error, message, message_size);
    return 0;
  }
}

int64_t tfpar_transport_address(int64_t number, char* buffer, int64_t size) {
  const std::shared_ptr<Mesh> mesh = FindMesh(number);
  if (!mesh) return 0;
  const std::string address = mesh->address();
  const int64_t length = static_cast<int64_t>(address.size());
  if (length < size) std::memcpy(buffer, address.c_str(), address.size() + 1);
  return length;
}

int tfpar_transport_connect(int64_t number, const char* const* addresses, char* message, size_t message_size) {
  try {
    const std::shared_ptr<Mesh> mesh = FindMesh(number);
    if (!mesh) throw std::runtime_error("the transport is closed");
    mesh->Connect(std::vector<std::string>(addresses, addresses + mesh->size()));
    return 0;
  } catch (const std::exception& error) {
    tfpar::Say(error, message, message_size);
    return 1;
  }
}

int64_t tfpar_transport_dropped(int64_t number) {
  const std::shared_ptr<Mesh> mesh = FindMesh(number);
  return mesh ? static_cast<int64_t>(mesh->dropped()) : 0;
}

int64_t tfpar_transport_waiting_ms(int64_t number) {
  const std::shared_ptr<Mesh> mesh = FindMesh(number);
  return mesh ? mesh->WaitingMs() : 0;
}

void tfpar_transport_abort(int64_t number, int32_t own, const char* reason) {
  const std::shared_ptr<Mesh> mesh = FindMesh(number);
  if (mesh) mesh->Abort(own ? tfpar::Outcome::kFailed : tfpar::Outcome::kLost, reason);
}

void tfpar_transport_close(int64_t number) {
  OpenMesh closing;
  auto& all = All();
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.by_number.find(number);
    if (found == all.by_number.end() || found->second.process != getpid()) return;
    closing = std::move(found->second);
    all.by_number.erase(found);
  }
  closing.mesh.reset();  // which ends all calls
  closing.ended.wait();
}

}  // extern "C"
