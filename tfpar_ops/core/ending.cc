#include "ending.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <unistd.h>

#include <new>
#include <string>

namespace {

struct Order {
  int fd;
  int code;
};

// Reads a line from `fd` into `line`. Returns false if `fd` ends before the line does.
bool ReadLine(int fd, std::string& line) {
  char buffer[512];
  while (true) {
    const ssize_t n = read(fd, buffer, sizeof(buffer));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    line.append(buffer, static_cast<size_t>(n));
    if (line.back() == '\n') return true;
  }
}

void* Wait(void* argument) {
  const Order order = *static_cast<Order*>(argument);
  delete static_cast<Order*>(argument);
  std::string line;
  const bool complete = ReadLine(order.fd, line);
  close(order.fd);
  if (!complete) return nullptr;
  const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
  (void)written;  // the process ends even if the write failed
  _exit(order.code);
}

}  // namespace

extern "C" int tfpar_end_on_message(int fd, int code) {
  Order* order = new (std::nothrow) Order{fd, code};
  if (order == nullptr) return ENOMEM;
  pthread_t thread;
  const int error = pthread_create(&thread, nullptr, Wait, order);
  if (error != 0) {
    delete order;
    return error;
  }
  pthread_detach(thread);
  return 0;
}
