// fp8 (E4M3) with a power of two as the scale of each block.

struct Fp8 {
  typedef Wide L;
  static constexpr int kLargest = 4096;
  static constexpr int kDepth = 2;
  static constexpr uint32_t kNotANumber = 0x7F;
  static constexpr uint32_t kNaNScale = 255;
  static constexpr uint32_t kLargestMagnitude = 0x7F600000;  // 448 2^119: more would decode to infinity

  // The exponent e such that a 2^-e <= 448, from the bits of a.
  static TFPAR_INLINE int Exponent(uint32_t a) {
    const int e = static_cast<int>(a >> 23) - 127 - 8 + ((a & 0x7FFFFFu) > 0x600000u ? 1 : 0);
    return e < -126 ? -126 : e;
  }

  // 2^e, -126 <= e <= 127.
  static TFPAR_INLINE float PowerOfTwo(int e) { return Float(static_cast<uint32_t>(e + 127) << 23); }

  // With t = v 2^-e, |t| is rounded by adding a power of two whose last place is the spacing of E4M3 around |t|: 2^-9
  // for
  // |t| below 2^-6; otherwise 1/8 of the power of two below |t|. The low bits of the sum then count these spacings, and
  // a carry out of them is also a carry into the exponent of the code.
  static void EncodeLoop(const EncodeBlock& block, const float* __restrict v, int e) {
    const float to_code = PowerOfTwo(-e), from_code = PowerOfTwo(e);
    uint8_t* __restrict code = block.code;
    float* __restrict new_r = block.new_residual;
    const Ahead ahead = block.ahead;
    constexpr uint32_t kNormal = 121u << 23;  // 2^-6
    constexpr uint32_t kUp = 20u << 23;       // turns the power of two below |t| into the one to add
    for (int i = 0; i < block.size; i += L::kCount) {
      ahead.Fetch(i);
      const L::F value = L::Load(v + i);
      const L::F t = L::Float(L::Magnitude(L::Mul(value, L::Splat(to_code))));
      const L::U magic = L::MaxU(L::Bits(t) & kInfinity, L::SplatU(kNormal)) + kUp;
      const L::F sum = t + L::Float(magic);
      // Adding +0 turns -0 into +0.
      const L::F rounded = L::Float(L::Bits(sum - L::Float(magic)) | (L::Bits(value) & kSignBit)) + L::Splat(0.0f);
      const L::U magnitude = (L::Bits(sum) - magic) + ((magic - (kNormal + kUp)) >> 20);
      L::StoreBytes(magnitude | ((L::Bits(rounded) >> 24) & 0x80u), code + i);
      L::Store(L::Flush(L::Sub(value, L::Mul(rounded, L::Splat(from_code)))), new_r + i);
    }
  }

  typedef uint32_t Statistic;

  static TFPAR_INLINE Statistic Load(const EncodeBlock& block, float* v) { return LoadSum(block, v); }

  static TFPAR_INLINE void Write(const tfpar_codec&, const EncodeBlock& block, const float* v, Statistic a) {
    if (a == 0 || a > kLargestMagnitude) {
      __builtin_memset(block.code, 0, static_cast<size_t>(block.size));
      *block.scale = a == 0 ? 0 : kNaNScale;
      if (a == 0) {
        Fill(0.0f, block.size, block.new_residual);
      } else {
        KeepResidual(block);
      }
      return;
    }
    const int e = Exponent(a);
    *block.scale = static_cast<uint8_t>(e + 127);
    EncodeLoop(block, v, e);
  }

  // The multiplier of a scale byte: 0 for 0, NaN for 255.
  static TFPAR_INLINE float Multiplier(uint32_t scale) { return Float(scale == kNaNScale ? kNaN : scale << 23); }

  // E4M3 as float32; Fp16::Value explains the denormals.
  static TFPAR_INLINE L::F Value(L::U code) {
    const L::U magnitude = (code & 0x7Fu) << 20;
    const L::F normal = L::Float(magnitude + ((127u - 7u) << 23));
    const L::F denormal = normal + normal - L::Splat(0x1p-6f);
    const L::U finite = L::Bits(denormal < normal ? denormal : normal);
    const L::U special = magnitude == L::SplatU(kNotANumber << 20) ? L::SplatU(kNaN) : L::SplatU(0);
    return L::Float(finite | special | ((code & 0x80u) << 24));
  }

  template <int kPeers, bool kMore>
  static void SumCarefully(const Source* source, int size, float* __restrict acc) {
    for (int i = 0; i < size; i += L::kCount) {
      L::F sum;
      TFPAR_UNROLL_PLANES
      for (int p = 0; p < kPeers; ++p) {
        const L::F d = L::Flush(L::Mul(Value(L::LoadBytes(source[p].code + i)), L::Splat(Multiplier(*source[p].scale))));
        sum = p > 0 ? L::Add(sum, d) : kMore ? L::Add(L::Load(acc + i), d) : d;
      }
      L::Store(sum, acc + i);
    }
  }

#if defined(__F16C__)
  // Whether products with this scale are exact: neither denormal nor infinite, and 2^8 times the scale is a float32.
  static TFPAR_INLINE bool IsPlain(const Source& source, int size) {
    const uint32_t scale = *source.scale;
    if (scale != 0 && (scale < 10 || scale > 246)) return false;
    uint8_t largest = 0;
    for (int i = 0; i < (size & -64); ++i) {  // the mask tells the compiler that size is a multiple of 64
      const uint8_t magnitude = source.code[i] & 0x7F;
      largest = magnitude > largest ? magnitude : largest;
    }
    return largest != kNotANumber;
  }

  // E4M3 bits moved into a half are the same number times 2^-8, denormals included. Products with the scale are exact,
  // so fusing them with the sum does not change the result.
#if defined(__AVX512F__)
  static constexpr int kStep = 32;
  typedef __m512i Halves;
  static TFPAR_INLINE Halves LoadAsHalves(const uint8_t* code) {
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(code)));
    return _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(static_cast<short>(0xBF80)));
  }
  static TFPAR_INLINE L::F ToFloat(Halves halves, int which) {
    return _mm512_cvtph_ps(which == 0 ? _mm512_castsi512_si256(halves) : _mm512_extracti64x4_epi64(halves, 1));
  }
  static TFPAR_INLINE L::F MulAdd(L::F a, L::F b, L::F c) { return _mm512_fmadd_ps(a, b, c); }
#else
  static constexpr int kStep = 16;
  typedef __m256i Halves;
  static TFPAR_INLINE Halves LoadAsHalves(const uint8_t* code) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(code)));
    return _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xBF80)));
  }
  static TFPAR_INLINE L::F ToFloat(Halves halves, int which) {
    return _mm256_cvtph_ps(which == 0 ? _mm256_castsi256_si128(halves) : _mm256_extracti128_si256(halves, 1));
  }
  static TFPAR_INLINE L::F MulAdd(L::F a, L::F b, L::F c) { return _mm256_fmadd_ps(a, b, c); }
#endif

  template <int kPeers, bool kMore>
  static void SumPlain(const Source* source, int size, float* __restrict acc) {
    L::F scale[kPeers];
    for (int p = 0; p < kPeers; ++p) scale[p] = L::Splat(256.0f * Multiplier(*source[p].scale));
    for (int i = 0; i < size; i += kStep) {
      Halves halves[kPeers];
      for (int p = 0; p < kPeers; ++p) halves[p] = LoadAsHalves(source[p].code + i);
      for (int which = 0; which < 2; ++which) {
        float* to = acc + i + which * L::kCount;
        L::F sum = kMore ? L::Load(to) : L::Splat(0.0f);  // 0 + d is flush(d)
        TFPAR_UNROLL_PLANES
        for (int p = 0; p < kPeers; ++p) sum = MulAdd(ToFloat(halves[p], which), scale[p], sum);
        L::Store(sum, to);
      }
    }
  }
#endif

  template <int kPeers, bool kMore>
  static int Sum(const tfpar_codec&, const Source* source, int size, float* acc) {
#if defined(__F16C__)
    bool plain = true;
    for (int p = 0; p < kPeers; ++p) plain = plain && IsPlain(source[p], size);
    if (plain) {
      SumPlain<kPeers, kMore>(source, size, acc);
      return 0;
    }
#endif
    SumCarefully<kPeers, kMore>(source, size, acc);
    return 0;
  }
};
