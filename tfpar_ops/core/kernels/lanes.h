// Vectors of kN float32 or 32-bit integers, as GNU vector types, which the compiler maps to instructions of its target.
// Only widening and narrowing, which these types express badly, use x86 intrinsics, or a plain loop on other
// processors.

#if defined(__SSE2__)
// Stores 16 or 32 bytes of codes. With kStream, the store bypasses the caches, and `to` must be a multiple of 16.
template <bool kStream>
TFPAR_INLINE void StoreCodes(__m128i codes, uint8_t* to) {
  if constexpr (kStream) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), codes);
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), codes);
  }
}
#endif
#if defined(__AVX512F__)
template <bool kStream>
TFPAR_INLINE void StoreCodes(__m256i codes, uint8_t* to) {
  if constexpr (kStream) {
    StoreCodes<true>(_mm256_castsi256_si128(codes), to);
    StoreCodes<true>(_mm256_extracti128_si256(codes, 1), to + 16);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), codes);
  }
}
#endif

// (g++ 12 forgets a vector_size that depends on a template argument.)
template <int kN>
struct VectorTypes;
#define TFPAR_VECTOR_TYPES(n)                                \
  template <>                                                \
  struct VectorTypes<n> {                                    \
    typedef float F __attribute__((vector_size(4 * n)));     \
    typedef uint32_t U __attribute__((vector_size(4 * n)));  \
    typedef int32_t I __attribute__((vector_size(4 * n)));   \
  };
TFPAR_VECTOR_TYPES(2)
TFPAR_VECTOR_TYPES(4)
TFPAR_VECTOR_TYPES(8)
TFPAR_VECTOR_TYPES(16)
#undef TFPAR_VECTOR_TYPES

template <int kN>
struct Lanes {
  static constexpr int kCount = kN;
  typedef typename VectorTypes<kN>::F F;
  typedef typename VectorTypes<kN>::U U;
  typedef typename VectorTypes<kN>::I I;

  static TFPAR_INLINE F Load(const float* from) {
    F v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
  }
  static TFPAR_INLINE void Store(F v, float* to) { __builtin_memcpy(to, &v, sizeof v); }
  // Stores v, bypassing the caches if the target can; `to` must be aligned to the size of the vector.
  static TFPAR_INLINE void Stream(F v, float* to) {
#if defined(__AVX512F__)
    if constexpr (kN == 16) return _mm512_stream_ps(to, v);
#endif
#if defined(__AVX2__)
    if constexpr (kN == 8) return _mm256_stream_ps(to, v);
#endif
#if defined(__SSE2__)
    if constexpr (kN == 4) return _mm_stream_ps(to, v);
#endif
    Store(v, to);
  }
  static TFPAR_INLINE U LoadU(const uint32_t* from) {
    U v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
  }
  static TFPAR_INLINE void StoreU(U v, uint32_t* to) { __builtin_memcpy(to, &v, sizeof v); }
  static TFPAR_INLINE F Splat(float v) { return v - F{}; }
  static TFPAR_INLINE U SplatU(uint32_t v) { return v - U{}; }

  static TFPAR_INLINE U Bits(F v) { return reinterpret_cast<U>(v); }
  static TFPAR_INLINE F Float(U bits) { return reinterpret_cast<F>(bits); }
  static TFPAR_INLINE U Magnitude(F v) { return Bits(v) & ~kSignBit; }
  static TFPAR_INLINE U MaxU(U a, U b) { return a > b ? a : b; }
  static TFPAR_INLINE F FromInt(I v) { return __builtin_convertvector(v, F); }
  static TFPAR_INLINE I ToInt(F v) { return __builtin_convertvector(v, I); }

  // These functions do what those of the same names in arithmetic.h do.
  static TFPAR_INLINE F DropDenormal(F v) {
#if TFPAR_HARDWARE_FLUSH
    return v;
#else
    return Float(Bits(v) & (Magnitude(v) < SplatU(kSmallestNormal) ? SplatU(kSignBit) : SplatU(~0u)));
#endif
  }
  static TFPAR_INLINE F Add(F a, F b) { return DropDenormal(DropDenormal(a) + DropDenormal(b)); }
  static TFPAR_INLINE F Sub(F a, F b) { return DropDenormal(DropDenormal(a) - DropDenormal(b)); }
  static TFPAR_INLINE F Mul(F a, F b) { return DropDenormal(DropDenormal(a) * DropDenormal(b)); }
  static TFPAR_INLINE F Flush(F v) { return DropDenormal(v) + Splat(0.0f); }

  // In each lane, the entry of `table` that the low kBits bits of `index` select. With 2 bits, every four lanes hold a
  // copy of the table. kCanPick: the target has an instruction for this, which saves a conversion and a product.
  template <int kBits>
  static constexpr bool kCanPick = (kN == 16 && (kBits == 4 || kBits == 2)) || (kN == 8 && kBits == 2);
  template <int kBits>
  static TFPAR_INLINE F Pick(F table, U index) {
#if defined(__AVX512F__)
    if constexpr (kN == 16 && kBits == 4) return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(index), table);
    if constexpr (kN == 16 && kBits == 2) return _mm512_permutevar_ps(table, reinterpret_cast<__m512i>(index));
#endif
#if defined(__AVX2__)
    if constexpr (kN == 8 && kBits == 2) return _mm256_permutevar_ps(table, reinterpret_cast<__m256i>(index));
#endif
    constexpr uint32_t kMask = (1u << kBits) - 1u;
    F picked{};
    for (uint32_t i = 0; i < kN; ++i) picked[i] = table[(i & ~kMask & (kN - 1)) + (index[i] & kMask & (kN - 1))];
    return picked;
  }

  // Bit i is set if lane i of a is at least lane i of b. Both must be below 2^31.
  static TFPAR_INLINE uint32_t MaskAtLeast(U a, U b) {
#if defined(__AVX512F__)
    if constexpr (kN == 16) return _mm512_cmpge_epu32_mask(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b));
#endif
    const I below = reinterpret_cast<I>(a) < reinterpret_cast<I>(b);
#if defined(__AVX2__)
    if constexpr (kN == 8) return ~static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(below))) & 0xFFu;
#endif
#if defined(__SSE2__)
    if constexpr (kN == 4) return ~static_cast<uint32_t>(_mm_movemask_ps(reinterpret_cast<__m128>(below))) & 0xFu;
#endif
    uint32_t mask = 0;
    for (int i = 0; i < kN; ++i) mask |= static_cast<uint32_t>(below[i] + 1) << i;
    return mask;
  }

  // v - a b, for products that are exact in float32 and not denormal: fusing then makes no difference.
  static TFPAR_INLINE F SubExactProduct(F v, F a, F b) {
#if defined(__AVX512F__)
    if constexpr (kN == 16) return _mm512_fnmadd_ps(a, b, v);
#endif
#if defined(__FMA__)
    if constexpr (kN == 8) return _mm256_fnmadd_ps(a, b, v);
#endif
    return Sub(v, Mul(a, b));
  }

  static TFPAR_INLINE U LoadBytes(const uint8_t* from) {
#if defined(__AVX512F__)
    if constexpr (kN == 16) {
      return reinterpret_cast<U>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    }
#endif
#if defined(__AVX2__)
    if constexpr (kN == 8) {
      return reinterpret_cast<U>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
    }
#endif
#if defined(__SSE2__)
    if constexpr (kN == 4) {
      int four;
      __builtin_memcpy(&four, from, 4);
      const __m128i zero = _mm_setzero_si128();
      return reinterpret_cast<U>(_mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(four), zero), zero));
    }
#endif
    U v{};
    for (int i = 0; i < kN; ++i) v[i] = from[i];
    return v;
  }

  static TFPAR_INLINE I LoadSignedBytes(const uint8_t* from) {
#if defined(__AVX512F__)
    if constexpr (kN == 16) {
      return reinterpret_cast<I>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    }
#endif
#if defined(__AVX2__)
    if constexpr (kN == 8) {
      return reinterpret_cast<I>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
    }
#endif
    return reinterpret_cast<I>(LoadBytes(from) << 24) >> 24;
  }

  static TFPAR_INLINE U LoadHalves(const uint8_t* from) {
#if defined(__AVX512F__)
    if constexpr (kN == 16) {
      return reinterpret_cast<U>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
    }
#endif
#if defined(__AVX2__)
    if constexpr (kN == 8) {
      return reinterpret_cast<U>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    }
#endif
#if defined(__SSE2__)
    if constexpr (kN == 4) {
      const __m128i halves = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
      return reinterpret_cast<U>(_mm_unpacklo_epi16(halves, _mm_setzero_si128()));
    }
#endif
    U v{};
    for (int i = 0; i < kN; ++i) v[i] = reinterpret_cast<const AnyU16*>(from)[i];
    return v;
  }

  // Stores the lower half of each lane; the upper half must be 0.
  template <bool kStream>
  static TFPAR_INLINE void StoreHalves(U v, uint8_t* to) {
#if defined(__AVX512F__)
    if constexpr (kN == 16) return StoreCodes<kStream>(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(v)), to);
#endif
#if defined(__AVX2__)
    if constexpr (kN == 8) {
      const __m256i wide = reinterpret_cast<__m256i>(v);
      const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(wide, wide), 0x08);
      return StoreCodes<kStream>(_mm256_castsi256_si128(packed), to);
    }
#endif
#if defined(__SSE2__)
    if constexpr (kN == 4) {  // only a signed pack in SSE2
      const __m128i wide = reinterpret_cast<__m128i>(reinterpret_cast<I>(v << 16) >> 16);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi32(wide, wide));
      return;
    }
#endif
    for (int i = 0; i < kN; ++i) reinterpret_cast<AnyU16*>(to)[i] = static_cast<uint16_t>(v[i]);
  }

  // Stores the low byte of each lane.
  static TFPAR_INLINE void StoreBytes(U v, uint8_t* to) {
#if defined(__AVX512F__)
    if constexpr (kN == 16) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(v)));
      return;
    }
#endif
#if defined(__AVX2__)
    if constexpr (kN == 8) {
      const __m256i first = _mm256_set1_epi32(0x0C080400);
      const __m256i packed = _mm256_shuffle_epi8(reinterpret_cast<__m256i>(v), first);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(to),
                       _mm_unpacklo_epi32(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1)));
      return;
    }
#endif
#if defined(__SSE2__)
    if constexpr (kN == 4) {
      const __m128i low = reinterpret_cast<__m128i>(v & 0xFFu);
      const __m128i halves = _mm_packs_epi32(low, low);
      const int bytes = _mm_cvtsi128_si32(_mm_packus_epi16(halves, halves));
      __builtin_memcpy(to, &bytes, 4);
      return;
    }
#endif
    for (int i = 0; i < kN; ++i) to[i] = static_cast<uint8_t>(v[i]);
  }
};

// Whether the target has stores that bypass the caches, and the fence that they need before other threads read the
// data.
#if defined(__SSE2__)
constexpr bool kCanStream = true;
inline void EndStreams() { _mm_sfence(); }
#else
constexpr bool kCanStream = false;
inline void EndStreams() {}
#endif

// Vectors of the target's full width.
#if defined(__AVX512F__)
typedef Lanes<16> Wide;
#elif defined(__AVX2__)
typedef Lanes<8> Wide;
#else
typedef Lanes<4> Wide;
#endif
// The widest vectors that a plane of the smallest block (64 elements in eight planes) fills.
typedef Lanes<Wide::kCount < 8 ? Wide::kCount : 8> Narrow;
