#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <map>
#include <vector>

#include "cuda_runtime.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

constexpr size_t kLargestShared = 64 * 1024;  // of compute capability 7.5, the lowest that the kernels are built for
extern __align__(16) unsigned char tfpar_shared_memory[kLargestShared];
unsigned char tfpar_shared_memory[kLargestShared];

namespace emulation {

dim3 thread_index, block_index, block_size;

namespace {

[[noreturn]] void Fail(const char* what) {
  fprintf(stderr, "emulation: %s\n", what);
  abort();
}

// Treats denormals as zeros while kernels run, as -ftz=true does.
class DenormalsOff {
 public:
#if defined(__x86_64__)
  DenormalsOff() : mode_(_mm_getcsr()) { _mm_setcsr(mode_ | 0x8040u); }
  ~DenormalsOff() { _mm_setcsr(mode_); }

 private:
  unsigned mode_;
#elif defined(__aarch64__)
  DenormalsOff() {
    asm volatile("mrs %0, fpcr" : "=r"(mode_));
    asm volatile("msr fpcr, %0" : : "r"(mode_ | uint64_t{1} << 24));
  }
  ~DenormalsOff() { asm volatile("msr fpcr, %0" : : "r"(mode_)); }

 private:
  uint64_t mode_;
#else
#error "no way known to switch denormals off on this processor"
#endif
};

constexpr unsigned kLargestThreadBlock = 1024;

enum State { kReady, kAtWarp, kAtBarrier, kDone };

// An emulated GPU thread with its own stack. All thread blocks reuse it. It starts with setcontext; later switches use
// _setjmp and _longjmp, which make no system call.
struct Fiber {
  ucontext_t start;
  jmp_buf place;
  std::vector<char> stack;
  State state;
  unsigned exchanges, barriers;
};

// Exchanges alternate between two buffers: a thread may start the next exchange before another has read the previous
// one.
struct Warp {
  unsigned waiting;
  char value[2][32][8];
};

jmp_buf scheduler;
Fiber fibers[kLargestThreadBlock];
std::vector<Warp> warps;
unsigned running, waiting;
bool flags[2];
size_t allowed_shared = 48 * 1024;
bool backward = false;
const std::function<void()>* body;

void Wait(State state) {
  Fiber& fiber = fibers[running];
  fiber.state = state;
  if (_setjmp(fiber.place) == 0) _longjmp(scheduler, 1);
}

void RunBody() {
  for (;;) {
    (*body)();
    Wait(kDone);
  }
}

// Lets a fiber run until it waits.
void Resume(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (!fiber.stack.empty()) _longjmp(fiber.place, 1);
  fiber.stack.resize(64 * 1024);
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = fiber.stack.data();
  fiber.start.uc_stack.ss_size = fiber.stack.size();
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, RunBody, 0);
  setcontext(&fiber.start);
}

void Release(State state, unsigned first, unsigned count) {
  for (unsigned i = first; i < first + count; ++i) {
    if (fibers[i].state != state) Fail("threads wait in different places");
    fibers[i].state = kReady;
  }
}

void Start(unsigned threads) {
  waiting = 0;
  flags[0] = flags[1] = false;
  warps.assign(threads / 32, Warp());
  for (unsigned i = 0; i < threads; ++i) {
    fibers[i].state = kReady;
    fibers[i].exchanges = fibers[i].barriers = 0;
  }
}

// Threads run in rising or falling order: code that lacks a barrier gets the right data in at most one of the two.
void RunThreadBlock(unsigned threads, bool backward) {
  Start(threads);
  for (unsigned done = 0; done < threads;) {
    bool moved = false;
    done = 0;
    for (unsigned i = 0; i < threads; ++i) {
      running = backward ? threads - 1 - i : i;
      if (fibers[running].state == kReady) {
        thread_index.x = running;
        Resume(fibers[running]);
        moved = true;
      }
      done += fibers[running].state == kDone;
    }
    if (!moved && done < threads) Fail("threads wait for others that do not come");
  }
}

}  // namespace

void AllowShared(size_t bytes) {
  if (bytes > kLargestShared) Fail("more shared memory than every device has");
  allowed_shared = bytes;
}

void Run(unsigned thread_blocks, unsigned threads, size_t shared_bytes, const std::function<void()>& kernel) {
  if (threads % 32 != 0 && threads > 1) Fail("not a whole number of warps");
  if (shared_bytes > allowed_shared) Fail("shared memory beyond 48 KB that was not asked for");
  const DenormalsOff denormals_off;
  body = &kernel;
  block_size.x = threads;
  for (block_index.x = 0; block_index.x < thread_blocks; ++block_index.x) {
    memset(tfpar_shared_memory, 0xA5, shared_bytes);
    RunThreadBlock(threads, backward);
    backward = !backward;
  }
  allowed_shared = 48 * 1024;
}

void Exchange(void* value, size_t bytes, int lane) {
  Fiber& fiber = fibers[running];
  const unsigned self = running, round = fiber.exchanges++ % 2;
  Warp& warp = warps[self / 32];
  memcpy(warp.value[round][self % 32], value, bytes);
  fiber.state = kAtWarp;
  if (++warp.waiting == 32) {
    warp.waiting = 0;
    Release(kAtWarp, self / 32 * 32, 32);
  } else {
    Wait(kAtWarp);
  }
  memcpy(value, warp.value[round][lane], bytes);
}

bool Barrier(bool flag) {
  Fiber& fiber = fibers[running];
  const unsigned round = fiber.barriers++ % 2;
  flags[round] |= flag;
  fiber.state = kAtBarrier;
  if (++waiting == block_size.x) {
    waiting = 0;
    flags[1 - round] = false;
    Release(kAtBarrier, 0, block_size.x);
  } else {
    Wait(kAtBarrier);
  }
  return flags[round];
}

namespace {

// Start and length of the mapping of each allocation.
std::map<void*, std::pair<void*, size_t>>& Allocations() {
  static std::map<void*, std::pair<void*, size_t>> allocations;
  return allocations;
}

}  // namespace
}  // namespace emulation

// The end of an allocation, not its beginning, is at a page boundary: an access past the end faults.
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t pages = (bytes + page - 1) / page * page;
  char* start =
      static_cast<char*>(mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (start == MAP_FAILED || mprotect(start + pages, page, PROT_NONE) != 0) return cudaErrorMemoryAllocation;
  *pointer = start + pages - bytes;
  emulation::Allocations()[*pointer] = {start, pages + page};
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  const auto found = emulation::Allocations().find(pointer);
  if (found == emulation::Allocations().end()) return cudaErrorInvalidValue;
  munmap(found->second.first, found->second.second);
  emulation::Allocations().erase(found);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "error"; }
