// Runs all tests, or those whose name contains the first argument.
#include <csignal>
#include <cstdio>
#include <cstring>

#include "../check.h"

// Gloo 0.5 leaks the result of the address lookup if it finds no address.
extern "C" const char* __lsan_default_suppressions() { return "leak:gloo::transport::tcp::CreateDeviceAttr\n"; }

// A buffer's destructor waits until Gloo's own thread has released it, using the counts of a shared_ptr in the library
// (gloo/common/memory.h). The sanitizer does not see this, because the library is not built with it.
extern "C" const char* __tsan_default_suppressions() { return "race:gloo::transport::tcp::UnboundBuffer::\n"; }

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_DFL);  // as in a program that restores it: the transport must not raise it
  int run = 0;
  for (const check::Test& test : check::Tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    const int before = check::Failures();
    test.run();
    std::printf("  %-45s %s\n", test.name, check::Failures() == before ? "ok" : "FAILED");
    std::fflush(stdout);
    ++run;
  }
  std::printf("%d tests, %d failed checks\n", run, check::Failures());
  return check::Failures() == 0 && run > 0 ? 0 : 1;
}
