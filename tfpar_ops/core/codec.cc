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

int HeaderKind(const tfpar_codec& codec) {
  int kind = codec.kind;
  if (codec.kind == TFPAR_QUANTIZE) kind = codec.bits == 8 ? 4 : codec.bits == 4 ? 5 : 6;
  if (codec.kind == TFPAR_SIGN) kind = 7;
  if (codec.kind == TFPAR_TOPK) kind = 8;
  return kind + (codec.scale_bits == 32 ? 128 : 0);
}

void PutLittleEndian(uint64_t value, int bytes, unsigned char* to) {
  for (int i = 0; i < bytes; ++i) to[i] = static_cast<unsigned char>(value >> (8 * i));
}

uint64_t GetLittleEndian(const unsigned char* from, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) value |= static_cast<uint64_t>(from[i]) << (8 * i);
  return value;
}

void WriteHeader(const tfpar_codec& codec, int64_t n, unsigned char* header) {
  static const unsigned char kMagic[4] = {0x54, 0x46, 0x50, 0x01};
  std::memcpy(header, kMagic, 4);
  header[4] = static_cast<unsigned char>(HeaderKind(codec));
  header[5] = static_cast<unsigned char>(__builtin_ctz(static_cast<unsigned>(codec.block)));
  PutLittleEndian(static_cast<uint64_t>(codec.keep), 2, header + 6);
  PutLittleEndian(static_cast<uint64_t>(n), 8, header + 8);
}

bool IsPowerOfTwo(int32_t value) { return value > 0 && (value & (value - 1)) == 0; }

const char* KindName(int32_t kind) {
  static const char* const kNames[] = {"bf16", "fp16", "fp8", "quantize", "sign", "topk"};
  return kind >= TFPAR_BF16 && kind <= TFPAR_TOPK ? kNames[kind - 1] : "unknown";
}

}  // namespace

int tfpar_codec_check(const tfpar_codec* codec, char* message, size_t message_size) {
  const auto fail = [&](const char* option, long long value, const char* allowed) {
    std::snprintf(message, message_size, "codec %s: %s=%lld; %s", KindName(codec->kind), option, value, allowed);
    return 1;
  };
  const int32_t kind = codec->kind;
  const bool cast = kind == TFPAR_BF16 || kind == TFPAR_FP16;
  const bool scaled = kind == TFPAR_QUANTIZE || kind == TFPAR_SIGN;
  if (kind < TFPAR_BF16 || kind > TFPAR_TOPK) return fail("kind", kind, "allowed are 1 to 6");
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
  unsigned char expected[tfpar::kHeaderBytes];
  WriteHeader(*codec, n, expected);
  const auto* found = static_cast<const unsigned char*>(payload);
  static const struct {
    const char* name;
    int at, bytes;
  } kFields[] = {{"magic", 0, 4}, {"kind", 4, 1}, {"log2 of block", 5, 1}, {"keep", 6, 2}, {"elements", 8, 8}};
  for (const auto& field : kFields) {
    if (std::memcmp(found + field.at, expected + field.at, static_cast<size_t>(field.bytes)) == 0) continue;
    std::snprintf(message, message_size, "payload header: %s is %llu, expected %llu for codec %s", field.name,
                  static_cast<unsigned long long>(GetLittleEndian(found + field.at, field.bytes)),
                  static_cast<unsigned long long>(GetLittleEndian(expected + field.at, field.bytes)),
                  KindName(codec->kind));
    return 1;
  }
  return 0;
}

void tfpar_write_frame(const tfpar_codec* codec, int64_t n, void* payload) {
  auto* bytes = static_cast<unsigned char*>(payload);
  WriteHeader(*codec, n, bytes);
  const int64_t block_bytes = tfpar::CodeBytes(*codec) + tfpar::ScaleBytes(*codec);
  const int64_t used = tfpar::kHeaderBytes + tfpar::NumBlocks(*codec, n) * block_bytes;
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
