// A minimal test framework: TEST(name) { ... } registers a function; CHECK counts failures and prints their location.
#ifndef TFPAR_TESTS_NATIVE_CHECK_H_
#define TFPAR_TESTS_NATIVE_CHECK_H_

#include <cstdio>
#include <string>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

inline int& Failures() {
  static int failures = 0;
  return failures;
}

inline bool Register(const char* name, void (*run)()) {
  Tests().push_back({name, run});
  return true;
}

// Counts a failure, and prints it if it is one of the first twenty.
inline void Fail(const char* file, int line, const char* condition, const std::string& detail) {
  if (++Failures() <= 20) std::printf("%s:%d: not true: %s  [%s]\n", file, line, condition, detail.c_str());
}

}  // namespace check

#define TEST(name)                                                         \
  static void name();                                                      \
  static const bool name##_registered = check::Register(#name, name);      \
  static void name()

// `detail` is a std::string that is evaluated only if the condition is false.
#define CHECK(condition, detail)                                             \
  do {                                                                       \
    if (!(condition)) check::Fail(__FILE__, __LINE__, #condition, (detail)); \
  } while (false)

#endif  // TFPAR_TESTS_NATIVE_CHECK_H_
