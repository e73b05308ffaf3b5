// The C ABI: options, sizes, headers, and the choice among the instruction sets. The work is in kernels/.
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

using tfpar::Kernels;

// Rounding to nearest, denormals as zeros, no traps, while it lives; then the caller's mode again.
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
// __builtin_cpu_supports also asks whether the operating system saves the wide registers. Feature names, as compilers
// before 2021 do not know "x86-64-v4", nor "f16c", which comes from the processor's own list.
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
  // Threads that meet here for the first time find the same answer; no lock is needed.
  static std::atomic<const Kernels*> chosen{nullptr};
  const Kernels* kernels = chosen.load(std::memory_order_relaxed);
  if (kernels == nullptr) {
    kernels = Choose();
    chosen.store(kernels, std::memory_order_relaxed);
  }
  return *kernels;
}

// A field of a header, which is little-endian as the processor is.
uint64_t Field(const unsigned char* from, int bytes) {
  uint64_t value = 0;
  std::memcpy(&value, from, static_cast<size_t>(bytes));
  return value;
}

bool IsPowerOfTwo(int32_t value) { return value > 0 && (value & (value - 1)) == 0; }

const char* KindName(int32_t kind) {
  static const char* const kNames[] = {"bf16", "fp16", "fp8", "quantize", "sign", "topk"};
  return kind >= TFPAR_BF16 && kind <= TFPAR_TOPK ? kNames[kind - 1] : "unknown";
}

// What the kind of a header stands for, without the scales.
const char* FormatName(uint64_t kind) {
  static const char* const kNames[] = {
      "no codec", "bf16", "fp16", "fp8", "quantize, 8 bits", "quantize, 4 bits", "quantize, 2 bits", "sign", "topk",
  };
  const uint64_t number = kind & ~uint64_t{tfpar::kFloatScales};
  return kNames[number < sizeof kNames / sizeof *kNames ? number : 0];
}

const char* ScalesName(uint64_t kind) { return kind & tfpar::kFloatScales ? ", float32 scales" : ""; }

// Says how a field of a header differs from what was expected.
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
                  KindName(codec.kind));
  }
}

// One of topk's positions, which may lie at any address.
uint32_t PositionAt(const unsigned char* positions, int64_t entry) {
  uint16_t position;
  std::memcpy(&position, positions + 2 * entry, sizeof position);
  return position;
}

}  // namespace

int32_t tfpar_abi_version(void) { return TFPAR_ABI_VERSION; }

int tfpar_codec_check(const tfpar_codec* codec, char* message, size_t message_size) {
  const auto fail = [&](const char* option, long long value, const char* allowed) {
    std::snprintf(message, message_size, "codec %s: %s=%lld; %s", KindName(codec->kind), option, value, allowed);
    return 1;
  };
  const int32_t kind = codec->kind;
  const bool cast = kind == TFPAR_BF16 || kind == TFPAR_FP16;
  const bool scaled = kind == TFPAR_QUANTIZE || kind == TFPAR_SIGN;
  if (kind < TFPAR_BF16 || kind > TFPAR_TOPK) return fail("kind", kind, "allowed are 1 to 6: bf16, fp16, fp8, quantize, sign, topk");
  if (kind == TFPAR_QUANTIZE) {
    if (codec->bits != 8 && codec->bits != 4 && codec->bits != 2) return fail("bits", codec->bits, "allowed are 8, 4, 2");
  } else if (codec->bits != 0) {
    return fail("bits", codec->bits, "only quantize has bits, else 0");
  }
  if (cast) {
    if (codec->block != 1024) return fail("block", codec->block, "bf16 and fp16 have 1024");
  } else {
    const int32_t largest = kind == TFPAR_TOPK ? 16384 : 4096;
    if (!IsPowerOfTwo(codec->block) || codec->block < 64 || codec->block > largest) {
      return fail("block", codec->block,
                  kind == TFPAR_TOPK ? "allowed are powers of two, 64 to 16384" : "allowed are powers of two, 64 to 4096");
    }
  }
  if (kind == TFPAR_TOPK) {
    if (codec->keep < 1 || codec->keep > codec->block) return fail("keep", codec->keep, "allowed is 1 to block");
  } else if (codec->keep != 0) {
    return fail("keep", codec->keep, "only topk has keep, else 0");
  }
  if (scaled) {
    if (codec->scale_bits != 16 && codec->scale_bits != 32) {
      return fail("scale_bits", codec->scale_bits, "allowed are 16, 32");
    }
  } else if (codec->scale_bits != 0) {
    return fail("scale_bits", codec->scale_bits, "only quantize and sign have scale_bits, else 0");
  }
  if (codec->stochastic != 0 && codec->stochastic != 1) return fail("stochastic", codec->stochastic, "allowed are 0, 1");
  if (codec->stochastic == 1 && kind != TFPAR_QUANTIZE) {
    return fail("stochastic", codec->stochastic, "only quantize can round stochastically, else 0");
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
                  KindName(codec->kind));
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
  if (codec->kind != TFPAR_TOPK) return 0;
  const auto size = static_cast<uint32_t>(codec->block);
  for (int64_t block = first_block; block < last_block; ++block) {
    const unsigned char* positions =
        static_cast<const unsigned char*>(payload) + tfpar::kHeaderBytes + block * tfpar::CodeBytes(*codec);
    uint32_t all = 0;  // bits of all positions: the size being a power of two, they are below it together or not at all
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
