// The C ABI: options, sizes, headers, and the choice of the instruction set. The codecs themselves are in kernels/.
#include "codec.h"

#include <atomic>
#include <cfenv>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

namespace {

using tfpar::Format;
using tfpar::Kernels;

// Sets the floating-point mode (round to nearest, denormals are zeros, no traps) and restores the caller's mode when
// destroyed.
class ArithmeticMode {
 public:
#if TFPAR_HARDWARE_FLUSH && defined(__x86_64__)
  ArithmeticMode() : saved_(_mm_getcsr()) { _mm_setcsr(kMasked | kFlushResults | kFlushInputs); }
  ~ArithmeticMode() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kMasked = 0x1F80, kFlushResults = 0x8000, kFlushInputs = 0x0040;
  const unsigned saved_;
#elif TFPAR_HARDWARE_FLUSH && defined(__aarch64__)
  ArithmeticMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    Set(kFlush);
  }
  ~ArithmeticMode() { Set(saved_); }

 private:
  static void Set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
  static constexpr uint64_t kFlush = uint64_t{1} << 24;
  uint64_t saved_;
#else
  ArithmeticMode() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~ArithmeticMode() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
#endif
 public:
  ArithmeticMode(const ArithmeticMode&) = delete;
  ArithmeticMode& operator=(const ArithmeticMode&) = delete;
};

#if defined(__x86_64__)
// __builtin_cpu_supports also checks that the operating system saves the wide registers. Compilers from before 2021
// know neither "x86-64-v4", hence the separate feature names, nor "f16c", which is therefore read with cpuid.
bool SupportsV3() {
  unsigned a, b, c, d;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

bool SupportsV4() {
  return SupportsV3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#else
bool SupportsV3() { return false; }
bool SupportsV4() { return false; }
#endif

const Kernels* Choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  const char* wish = std::getenv("TFPAR_OPS_TARGET");
  if (wish == nullptr) wish = "";
  const Kernels* v3 = SupportsV3() ? tfpar::V3Kernels() : nullptr;
  const Kernels* v4 = SupportsV4() ? tfpar::V4Kernels() : nullptr;
  if (std::strcmp(wish, "baseline") == 0) return tfpar::BaselineKernels();
  if (v4 != nullptr && std::strcmp(wish, "x86-64-v3") != 0) return v4;
  return v3 != nullptr ? v3 : tfpar::BaselineKernels();
}

const Kernels& Chosen() {
  // Threads that race on the first call all choose the same kernels, so no lock is needed.
  static std::atomic<const Kernels*> chosen{nullptr};
  const Kernels* kernels = chosen.load(std::memory_order_relaxed);
  if (kernels == nullptr) {
    kernels = Choose();
    chosen.store(kernels, std::memory_order_relaxed);
  }
  return *kernels;
}

// A field of a header. The header is little-endian, and so is the processor.
uint64_t Field(const unsigned char* from, int bytes) {
  uint64_t value = 0;
  std::memcpy(&value, from, static_cast<size_t>(bytes));
  return value;
}

bool IsPowerOfTwo(int32_t value) { return value > 0 && (value & (value - 1)) == 0; }

const char* KindName(int64_t kind, const char* otherwise) {
  const Format* format = tfpar::FindFormat(kind);
  return format == nullptr ? otherwise : format->name;
}

// The name of the format that a header's kind stands for, without the scales.
const char* FormatName(uint64_t kind) {
  return KindName(static_cast<int64_t>(kind & ~uint64_t{tfpar::kFloatScales}), "no codec");
}

const char* ScalesName(uint64_t kind) { return kind & tfpar::kFloatScales ? ", float32 scales" : ""; }

// Writes to `message` how a field of a header differs from its expected value.
void DescribeField(const char* name, uint64_t found, uint64_t expected, const tfpar_codec& codec, char* message,
                   size_t message_size) {
  const auto is = static_cast<unsigned long long>(found), should_be = static_cast<unsigned long long>(expected);
  if (std::strcmp(name, "magic") == 0) {
    std::snprintf(message, message_size, "payload header: magic is 0x%08llx, expected 0x%08llx", is, should_be);
  } else if (std::strcmp(name, "kind") == 0) {
    std::snprintf(message, message_size, "payload header: kind is %llu (%s%s), expected %llu (%s%s)", is,
                  FormatName(found), ScalesName(found), should_be, FormatName(expected), ScalesName(expected));
  } else {
    std::snprintf(message, message_size, "payload header: %s is %llu, expected %llu for codec %s", name, is, should_be,
                  KindName(codec.kind, "unknown"));
  }
}

bool KeepsSome(const Format& format) { return format.codes == tfpar::Codes::KEPT; }
bool HasFloatScales(const Format& format) { return format.scale == tfpar::ScaleType::FLOAT; }
bool RoundsStochastically(const Format& format) { return format.rounding == tfpar::Rounding::STOCHASTIC; }

// Appends to a message of `length` characters the names of the formats that have an option. If `has_option` is null,
// appends number and name of every format.
void AppendNames(char* message, size_t message_size, int length, bool (*has_option)(const Format&)) {
  const char* separator = " ";
  for (const Format& format : tfpar::kFormats) {
    if (static_cast<size_t>(length) >= message_size) return;
    if (has_option != nullptr && !has_option(format)) continue;
    char number[16] = "";
    if (has_option == nullptr) std::snprintf(number, sizeof number, "%ld ", static_cast<long>(format.number));
    length += std::snprintf(message + length, message_size - static_cast<size_t>(length), "%s%s%s", separator, number,
                            format.name);
    separator = ", ";
  }
}

// One of topk's positions. Its address may have any alignment.
uint32_t PositionAt(const unsigned char* positions, int64_t entry) {
  uint16_t position;
  std::memcpy(&position, positions + 2 * entry, sizeof position);
  return position;
}

}  // namespace

int32_t tfpar_abi_version(void) { return TFPAR_ABI_VERSION; }

int tfpar_codec_check(const tfpar_codec* codec, char* message, size_t message_size) {
  const Format* format = tfpar::FindFormat(codec->kind);
  if (format == nullptr) {
    const int at = std::snprintf(message, message_size, "codec: kind=%lld; allowed are", static_cast<long long>(codec->kind));
    AppendNames(message, message_size, at, nullptr);
    return 1;
  }
  const auto fail = [&](const char* option, long long value, const char* allowed) {
    return std::snprintf(message, message_size, "codec %s: %s=%lld; %s", format->name, option, value, allowed);
  };
  // The option belongs to other formats, so it must be 0.
  const auto fail_foreign = [&](const char* option, long long value, bool (*has)(const Format&)) {
    AppendNames(message, message_size, fail(option, value, "must be 0, it is an option of"), has);
    return 1;
  };
  if (!IsPowerOfTwo(codec->block) || codec->block < format->smallest_block || codec->block > format->largest_block) {
    char allowed[64];
    const bool fixed = format->smallest_block == format->largest_block;
    std::snprintf(allowed, sizeof allowed, fixed ? "allowed is %ld" : "allowed are powers of two, %ld to %ld",
                  static_cast<long>(format->smallest_block), static_cast<long>(format->largest_block));
    fail("block", codec->block, allowed);
    return 1;
  }
  if (!KeepsSome(*format)) {
    if (codec->keep != 0) return fail_foreign("keep", codec->keep, KeepsSome);
  } else if (codec->keep < 1 || codec->keep > codec->block) {
    fail("keep", codec->keep, "allowed is 1 to block");
    return 1;
  }
  if (!HasFloatScales(*format)) {
    if (codec->scale_bits != 0) return fail_foreign("scale_bits", codec->scale_bits, HasFloatScales);
  } else if (codec->scale_bits != 16 && codec->scale_bits != 32) {
    fail("scale_bits", codec->scale_bits, "allowed are 16, 32");
    return 1;
  }
  if (codec->stochastic != 0 && codec->stochastic != 1) {
    fail("stochastic", codec->stochastic, "allowed are 0, 1");
    return 1;
  }
  if (codec->stochastic == 1 && !RoundsStochastically(*format)) {
    return fail_foreign("stochastic", codec->stochastic, RoundsStochastically);
  }
  return 0;
}

int64_t tfpar_num_blocks(const tfpar_codec* codec, int64_t n) { return n < 0 ? -1 : tfpar::NumBlocks(*codec, n); }

int64_t tfpar_payload_bytes(const tfpar_codec* codec, int64_t n) {
  if (n < 0) return -1;
  int64_t bytes;
  const int64_t block_bytes = tfpar::CodeBytes(*codec) + tfpar::ScaleBytes(*codec);
  if (__builtin_mul_overflow(tfpar::NumBlocks(*codec, n), block_bytes, &bytes)) return -1;
  if (__builtin_add_overflow(bytes, tfpar::kHeaderBytes + 15, &bytes)) return -1;
  return bytes & ~int64_t{15};
}

int tfpar_payload_check(const tfpar_codec* codec, int64_t n, const void* payload, int64_t bytes, char* message,
                        size_t message_size) {
  const int64_t expected_bytes = tfpar_payload_bytes(codec, n);
  if (expected_bytes < 0 || bytes != expected_bytes) {
    std::snprintf(message, message_size, "payload of %lld bytes, expected %lld for %lld elements with codec %s",
                  static_cast<long long>(bytes), static_cast<long long>(expected_bytes), static_cast<long long>(n),
                  KindName(codec->kind, "unknown"));
    return 1;
  }
  const tfpar::Header header = tfpar::MakeHeader(*codec, n);
  unsigned char expected[tfpar::kHeaderBytes];
  std::memcpy(expected, &header, sizeof expected);
  const auto* found = static_cast<const unsigned char*>(payload);
  static const struct {
    const char* name;
    int at, bytes;
  } kFields[] = {{"magic", 0, 4}, {"kind", 4, 1}, {"log2 of block", 5, 1}, {"keep", 6, 2}, {"elements", 8, 8}};
  for (const auto& field : kFields) {
    if (std::memcmp(found + field.at, expected + field.at, static_cast<size_t>(field.bytes)) == 0) continue;
    DescribeField(field.name, Field(found + field.at, field.bytes), Field(expected + field.at, field.bytes), *codec,
                  message, message_size);
    return 1;
  }
  return 0;
}

int tfpar_positions_check(const tfpar_codec* codec, const void* payload, int64_t first_block, int64_t last_block,
                          char* message, size_t message_size) {
  if (tfpar::FindFormat(codec->kind)->codes != tfpar::Codes::KEPT) return 0;
  const auto size = static_cast<uint32_t>(codec->block);
  for (int64_t block = first_block; block < last_block; ++block) {
    const unsigned char* positions =
        static_cast<const unsigned char*>(payload) + tfpar::kHeaderBytes + block * tfpar::CodeBytes(*codec);
    uint32_t all = 0;  // the OR of all positions: as the size is a power of two, `all` < size if every position is
    for (int64_t entry = 0; entry < codec->keep; ++entry) all |= PositionAt(positions, entry);
    if (all < size) continue;
    int64_t entry = 0;
    while (PositionAt(positions, entry) < size) ++entry;
    std::snprintf(message, message_size, "topk position %lu, in block %lld, is not below the block size, %lu",
                  static_cast<unsigned long>(PositionAt(positions, entry)), static_cast<long long>(block),
                  static_cast<unsigned long>(size));
    return 1;
  }
  return 0;
}

void tfpar_write_frame(const tfpar_codec* codec, int64_t n, void* payload) {
  auto* bytes = static_cast<unsigned char*>(payload);
  const tfpar::Header header = tfpar::MakeHeader(*codec, n);
  std::memcpy(bytes, &header, sizeof header);
  const int64_t used = tfpar::PaddingAt(*codec, n);
  std::memset(bytes + used, 0, static_cast<size_t>(tfpar_payload_bytes(codec, n) - used));
}

void tfpar_encode(const tfpar_codec* codec, const tfpar_vector* x, int64_t begin, int64_t n, const float* residual,
                  float* new_residual, void* payload, int64_t first_block, int64_t last_block, double* norms) {
  const ArithmeticMode mode;
  Chosen().encode(*codec, *x, begin, n, residual, new_residual, payload, first_block, last_block, norms);
}

int tfpar_decode_sum(const tfpar_codec* codec, int64_t n, const void* const* payloads, int64_t peers, float factor,
                     const tfpar_mutable_vector* out, int64_t begin, int64_t first_block, int64_t last_block) {
  const ArithmeticMode mode;
  return Chosen().decode_sum(*codec, n, payloads, peers, factor, *out, begin, first_block, last_block);
}

int tfpar_recode(const tfpar_codec* codec, int64_t n, const void* const* payloads, int64_t peers, float factor,
                 int64_t valid, int64_t begin, const float* residual, float* new_residual, void* payload,
                 int64_t first_block, int64_t last_block, double* norms) {
  const ArithmeticMode mode;
  return Chosen().recode(*codec, n, payloads, peers, factor, valid, begin, residual, new_residual, payload, first_block,
                         last_block, norms);
}

double tfpar_sum_squares(const tfpar_vector* x, int64_t begin, int64_t end) {
  const ArithmeticMode mode;
  return Chosen().sum_squares(*x, begin, end);
}

void tfpar_triad(float a, const float* x, float* y, int64_t n) {
  const ArithmeticMode mode;
  Chosen().triad(a, x, y, n);
}

const char* tfpar_cpu_target(void) { return Chosen().name; }
