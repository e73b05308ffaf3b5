// bf16 and fp16: each element is encoded independently.

struct Bf16 {
  typedef Wide L;
  static constexpr uint32_t kNotANumber = 0x7FC0;
  static constexpr uint32_t kPlain = 0x7F7F8000;  // smaller magnitudes need no check: they do not round to infinity

  // The code of v, which is not NaN. A finite v that would round to infinity saturates.
  static TFPAR_INLINE uint32_t Code(float v) { return RoundToBf16(v) >> 16; }
  static TFPAR_INLINE float Value(uint32_t code) { return Float(code << 16); }

  // Writes the codes of magnitudes below kPlain and returns the values of these codes.
  template <bool kStream>
  static TFPAR_INLINE L::F EncodeLanes(L::F v, uint8_t* code) {
    const L::U bits = L::Bits(v);
    const L::U rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
    L::StoreHalves<kStream>(rounded >> 16, code);
    return L::Float(rounded & 0xFFFF0000u);
  }
  static TFPAR_INLINE L::F DecodeLanes(const uint8_t* code) { return L::Float(L::LoadHalves(code) << 16); }
};

struct Fp16 {
  typedef Wide L;
  static constexpr uint32_t kNotANumber = 0x7E00;
  static constexpr uint32_t kPlain = 0x477FF000;           // 65520, halfway to where infinity would be
  static constexpr uint32_t kBias = (127 - 15) << 23;      // difference between the exponents of the two formats
  static constexpr uint32_t kSmallestNormal = 0x38800000;  // 2^-14

  static TFPAR_INLINE uint32_t Code(float v) {
    constexpr uint32_t kLargest = 0x477FE000;  // 65504
    uint32_t magnitude = Magnitude(v);
    magnitude = magnitude < kLargest ? magnitude : kLargest;
    const uint32_t normal = (magnitude - kBias + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    // Half denormals are multiples of 2^-24, which is the last place of 0.5: adding 0.5 rounds to such a multiple.
    const uint32_t denormal = Bits(Float(magnitude) + 0.5f) - Bits(0.5f);
    return (magnitude < kSmallestNormal ? denormal : normal) | ((Bits(v) & kSignBit) >> 16);
  }

  // With its exponent field moved up, a half with exponent 0 reads as n = 2^-15 (1 + m), m < 1, but its value is 2^-14
  // m, which is 2 n - 2^-14 and less than n. Any other half has the value n, and 2 n - 2^-14 is not less. The minimum
  // of the two is right for both.
  static TFPAR_INLINE float Value(uint32_t code) {
    const uint32_t magnitude = (code & 0x7FFFu) << 13;
    const float normal = Float(magnitude + kBias);
    const float denormal = 2.0f * normal - 0x1p-14f;
    const float finite = denormal < normal ? denormal : normal;
    const uint32_t special = magnitude >= 0x0F800000u ? kInfinity : 0u;  // exponent 31: infinity and NaN
    return Float(Bits(finite) | special | ((code & 0x8000u) << 16));
  }

  // The processor's conversions ignore the denormal mode and, with this argument, the rounding mode.
  template <bool kStream>
  static TFPAR_INLINE L::F EncodeLanes(L::F v, uint8_t* code) {
#if defined(__AVX512F__)
    const __m256i halves = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    StoreCodes<kStream>(halves, code);
    return _mm512_cvtph_ps(halves);
#elif defined(__F16C__)
    const __m128i halves = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    StoreCodes<kStream>(halves, code);
    return _mm256_cvtph_ps(halves);
#else
    const L::U magnitude = L::Magnitude(v), sign = L::Bits(v) & kSignBit;
    const L::U rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
    const L::F sum = L::Float(magnitude) + L::Splat(0.5f);
    const auto small = magnitude < L::SplatU(kSmallestNormal);
    const L::U half = small ? L::Bits(sum) - L::Bits(L::Splat(0.5f)) : (rounded - kBias) >> 13;
    L::StoreHalves<kStream>(half | (sign >> 16), code);
    const L::U value = small ? L::Bits(sum - L::Splat(0.5f)) : rounded & ~0x1FFFu;
    return L::Float(value | sign);
#endif
  }

  static TFPAR_INLINE L::F DecodeLanes(const uint8_t* code) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(code)));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(code)));
#else
    const L::U half = L::LoadHalves(code);
    const L::U magnitude = (half & 0x7FFFu) << 13;
    const L::F normal = L::Float(magnitude + kBias);
    const L::F denormal = normal + normal - L::Splat(0x1p-14f);
    const L::U finite = L::Bits(denormal < normal ? denormal : normal);
    const L::U special = magnitude >= L::SplatU(0x0F800000u) ? L::SplatU(kInfinity) : L::SplatU(0);
    return L::Float(finite | special | ((half & 0x8000u) << 16));
#endif
  }
};

template <class Format>
struct Cast {
  typedef Wide L;
  static constexpr int kLargest = 1024;
  static constexpr int kDepth = 2;

  template <bool kStream>
  static void EncodePlain(const EncodeBlock& block, const float* __restrict v) {
    uint8_t* __restrict code = block.code;
    float* __restrict new_r = block.new_residual;
    const Ahead ahead = block.ahead;
    for (int i = 0; i < kLargest; i += L::kCount) {
      ahead.Fetch(i);
      const L::F value = L::Load(v + i);
      L::Store(L::Flush(L::Sub(value, Format::template EncodeLanes<kStream>(value, code + 2 * i))), new_r + i);
    }
  }

  static void EncodeCarefully(const EncodeBlock& block, const float* v) {
    AnyU16* code = reinterpret_cast<AnyU16*>(block.code);
    for (int i = 0; i < kLargest; ++i) {
      const bool finite = Magnitude(v[i]) < kInfinity;
      const uint32_t c = Format::Code(v[i]);
      code[i] = static_cast<uint16_t>(finite ? c : Format::kNotANumber);
      const float old = block.residual != nullptr ? block.residual[i] : 0.0f;
      block.new_residual[i] = finite ? Flush(Sub(v[i], Format::Value(c))) : old;
    }
  }

  typedef uint32_t Statistic;

  static TFPAR_INLINE Statistic Load(const EncodeBlock& block, float* v) { return LoadSum(block, v); }

  static TFPAR_INLINE void Write(const tfpar_codec&, const EncodeBlock& block, const float* v, Statistic largest) {
    if (largest >= Format::kPlain) {
      EncodeCarefully(block, v);
    } else if (kCanStream && block.stream) {
      EncodePlain<true>(block, v);
    } else {
      EncodePlain<false>(block, v);
    }
  }

  template <int kPeers, bool kMore>
  static int Sum(const tfpar_codec&, const Source* source, int, float* __restrict acc) {
    for (int i = 0; i < kLargest; i += L::kCount) {
      L::F sum = Format::DecodeLanes(source[0].code + 2 * i);
      if (kMore) sum = L::Add(L::Load(acc + i), sum);
      TFPAR_UNROLL_PLANES
      for (int p = 1; p < kPeers; ++p) sum = L::Add(sum, Format::DecodeLanes(source[p].code + 2 * i));
      L::Store(sum, acc + i);
    }
    return 0;
  }
};
