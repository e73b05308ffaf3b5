// codec_cuda_test --test [part of a name]: the tests. codec_cuda_test --bench: throughput, as a Markdown table.
#include <chrono>
#include <cstdio>
#include <cstring>

#include "device.h"

void RunBenchmarks();

namespace {

int RunTests(const char* filter) {
  std::printf("processor's codecs: %s\n", tfpar_cpu_target());
  int run = 0;
  for (const check::Test& test : check::Tests()) {
    if (std::strstr(test.name, filter) == nullptr) continue;
    const auto start = std::chrono::steady_clock::now();
    const int before = check::Failures();
    test.run();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("  %-24s %s  %.1f s\n", test.name, check::Failures() == before ? "ok" : "FAILED", seconds.count());
    std::fflush(stdout);
    ++run;
  }
  std::printf("%d tests, %d failed checks\n", run, check::Failures());
  return check::Failures() == 0 && run > 0 ? 0 : 1;
}

// Returns whether there is a device, and prints its name or that there is none.
bool HasDevice() {
#if defined(TFPAR_EMULATION)
  std::printf("kernels emulated on the processor\n");
  return true;
#else
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess || devices == 0) {
    std::printf("compiled, not run: no usable CUDA device (%s)\n", cudaGetErrorString(error));
    return false;
  }
  cudaDeviceProp properties;
  device::Must(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  std::printf("device: %s, compute capability %d.%d\n", properties.name, properties.major, properties.minor);
  return true;
#endif
}

}  // namespace

int main(int argc, char** argv) {
  const bool test = argc > 1 && std::strcmp(argv[1], "--test") == 0;
  const bool bench = argc > 1 && std::strcmp(argv[1], "--bench") == 0;
  if (!test && !bench) {
    std::printf("usage: %s --test [part of a name] | --bench\n", argv[0]);
    return 2;
  }
  if (!HasDevice()) return 0;
  if (test) return RunTests(argc > 2 ? argv[2] : "");
#if defined(TFPAR_EMULATION)
  std::printf("an emulation has no throughput\n");
  return 2;
#else
  RunBenchmarks();
  return 0;
#endif
}
