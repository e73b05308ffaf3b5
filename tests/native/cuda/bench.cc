// Throughput of the kernels, as a share of a device-to-device copy of the gradient measured in the same run.
#include <algorithm>
#include <ctime>
#include <functional>
#include <string>

#include "../../../tfpar_ops/core/layout.h"
#include "device.h"

namespace {

constexpr int64_t kPeers = 4;
constexpr int kRounds = 21;

// Device memory without a host copy; null if there is not enough memory.
class Memory {
 public:
  explicit Memory(int64_t bytes) {
    if (cudaMalloc(&data_, static_cast<size_t>(bytes)) != cudaSuccess) {
      data_ = nullptr;
      cudaGetLastError();  // clear the error
    }
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { cudaFree(data_); }
  void* data() const { return data_; }
  float* floats() const { return static_cast<float*>(data_); }

 private:
  void* data_ = nullptr;
};

// Median of the seconds that the work takes on the device.
double Seconds(const std::function<void()>& queue) {
  cudaEvent_t start, end;
  device::Must(cudaEventCreate(&start), "cudaEventCreate");
  device::Must(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<double> seconds;
  for (int round = -3; round < kRounds; ++round) {  // three to warm up
    device::Must(cudaEventRecord(start), "cudaEventRecord");
    queue();
    device::Must(cudaEventRecord(end), "cudaEventRecord");
    device::Must(cudaEventSynchronize(end), "cudaEventSynchronize");
    float milliseconds = 0.0f;
    device::Must(cudaEventElapsedTime(&milliseconds, start, end), "cudaEventElapsedTime");
    if (round >= 0) seconds.push_back(milliseconds * 1e-3);
  }
  cudaEventDestroy(start);
  cudaEventDestroy(end);
  std::nth_element(seconds.begin(), seconds.begin() + kRounds / 2, seconds.end());
  return seconds[kRounds / 2];
}

// Normally distributed numbers that repeat after a million.
void Fill(float* to, int64_t n) {
  cases::Random random(1);
  cases::Floats values(static_cast<size_t>(std::min<int64_t>(n, 1 << 20)));
  for (float& value : values) value = random.Normal();
  int64_t filled = static_cast<int64_t>(values.size());
  device::Must(cudaMemcpy(to, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice), "cudaMemcpy");
  while (filled < n) {
    const int64_t more = std::min(filled, n - filled);
    device::Must(cudaMemcpy(to + filled, to, static_cast<size_t>(more) * sizeof(float), cudaMemcpyDeviceToDevice),
                 "cudaMemcpy");
    filled += more;
  }
}

std::string Label(const tfpar_codec& codec) {
  const std::string name = tfpar::FindFormat(codec.kind)->name;
  if (codec.keep > 0) return name + ", " + std::to_string(codec.keep) + " of " + std::to_string(codec.block);
  return name + (codec.stochastic ? ", stochastic" : "");
}

// The data that all codecs share for one size of gradient.
struct Arena {
  explicit Arena(int64_t n_in)
      : n(n_in), x(4 * n), residual(4 * n), out(4 * n), payloads((kPeers + 1) * (2 * n + (1 << 20))), small(1 << 20) {}
  bool IsWhole() const { return x.data() && residual.data() && out.data() && payloads.data() && small.data(); }

  int64_t n;
  Memory x, residual, out, payloads, small;
};

void PrintCell(double bytes, double seconds, double copy) {
  std::printf(" %.0f (%.0f%%) |", bytes / seconds * 1e-9, 100.0 * bytes / seconds / copy);
}

void PrintRow(const Arena& arena, const tfpar_codec& codec, double copy) {
  const int64_t n = arena.n, bytes = tfpar_payload_bytes(&codec, n);
  const int64_t offset[] = {0, n};
  const float* x = arena.x.floats();
  float* out = arena.out.floats();
  const tfpar_vector from = {&x, offset, 1};
  const tfpar_mutable_vector to = {&out, offset, 1};
  std::vector<void*> payloads;
  for (int64_t i = 0; i <= kPeers; ++i) payloads.push_back(static_cast<uint8_t*>(arena.payloads.data()) + i * bytes);
  const std::vector<const void*> peers(payloads.begin(), payloads.begin() + kPeers);
  const Memory scratch(tfpar_cuda_scratch_bytes(&codec, n));
  double* norms = static_cast<double*>(arena.small.data());

  const auto encode = [&](int64_t i, double* norms_or_null) {
    device::Must(tfpar_cuda_encode(&codec, &from, 0, n, arena.residual.floats(), arena.residual.floats(),
                                   payloads[static_cast<size_t>(i)], norms_or_null, scratch.data(), nullptr),
                 "tfpar_cuda_encode");
  };
  Fill(arena.residual.floats(), n);
  for (int64_t i = 0; i < kPeers; ++i) encode(i, nullptr);

  const double gradient = 4.0 * static_cast<double>(n), payload = static_cast<double>(bytes);
  std::printf("| %s | %.0f MB | %.3f |", Label(codec).c_str(), gradient * 1e-6, payload / static_cast<double>(n));
  PrintCell(3 * gradient + payload, Seconds([&] { encode(0, nullptr); }), copy);
  PrintCell(3 * gradient + payload, Seconds([&] { encode(0, norms); }), copy);
  PrintCell(gradient + kPeers * payload, Seconds([&] {
              device::Must(
                  tfpar_cuda_decode_sum(&codec, n, peers.data(), kPeers, 0.25f, nullptr, &to, 0, nullptr, nullptr),
                  "tfpar_cuda_decode_sum");
            }),
            copy);
  PrintCell(2 * gradient + (kPeers + 1) * payload, Seconds([&] {
              device::Must(
                  tfpar_cuda_recode(&codec, n, peers.data(), kPeers, 0.25f, nullptr, n, 0, arena.residual.floats(),
                                    arena.residual.floats(), payloads[kPeers], nullptr, nullptr, nullptr, nullptr),
                  "tfpar_cuda_recode");
            }),
            copy);
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

void RunBenchmarks() {
  cudaDeviceProp properties;
  device::Must(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  char date[32];
  const time_t now = time(nullptr);
  strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
  std::printf("\n%s, %s. GB/s of memory traffic, and its share of the copy's; medians of %d.\n\n", properties.name,
              date, kRounds);
  std::printf(
      "| codec | gradient | bytes an element | encode with residual | the same with norms | decode-sum of 4 | recode "
      "of 4 |\n");
  std::printf("|---|---:|---:|---:|---:|---:|---:|\n");
  for (int64_t n : {25000000, 250000000}) {
    const Arena arena(n);
    if (!arena.IsWhole()) {
      std::printf("| | %.0f MB | not enough device memory | | | | |\n", 4e-6 * static_cast<double>(n));
      continue;
    }
    Fill(arena.x.floats(), n);
    const double bytes = 8.0 * static_cast<double>(n);
    const double copy = bytes / Seconds([&] {
                          device::Must(cudaMemcpyAsync(arena.out.data(), arena.x.data(), static_cast<size_t>(4 * n),
                                                       cudaMemcpyDeviceToDevice),
                                       "cudaMemcpyAsync");
                        });
    std::printf("| copy | %.0f MB | | %.0f | | | |\n", 4e-6 * static_cast<double>(n), copy * 1e-9);
    for (const tfpar_codec& codec : cases::Defaults()) PrintRow(arena, codec, copy);
  }
}
