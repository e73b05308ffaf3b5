// Runs all tests, or those whose name contains the first argument.
#include <chrono>
#include <cstdio>
#include <cstring>

#include "../../tfpar_ops/core/codec.h"
#include "check.h"

int main(int argc, char** argv) {
  std::printf("instruction set: %s\n", tfpar_cpu_target());
  int run = 0;
  for (const check::Test& test : check::Tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    const auto start = std::chrono::steady_clock::now();
    const int before = check::Failures();
    test.run();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("  %-32s %s  %.1f s\n", test.name, check::Failures() == before ? "ok" : "FAILED", seconds.count());
    std::fflush(stdout);
    ++run;
  }
  std::printf("%d tests, %d failed checks\n", run, check::Failures());
  return check::Failures() == 0 && run > 0 ? 0 : 1;
}
