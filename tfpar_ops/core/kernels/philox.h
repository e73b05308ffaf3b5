// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), many counters at a time.

// Products of the low 32 bits of 64-bit lanes; the upper halves are ignored.
struct Lanes64 {
  static constexpr int kCount = Wide::kCount / 2;
  typedef uint64_t U __attribute__((vector_size(8 * kCount)));

  static TFPAR_INLINE U Splat(uint64_t v) { return v - U{}; }
  static TFPAR_INLINE U MultiplyLow(U a, U b) {
#if defined(__AVX512F__)
    return reinterpret_cast<U>(_mm512_mul_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
    return reinterpret_cast<U>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
    return reinterpret_cast<U>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
    return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
  }
  // Moves the upper half of each lane to the lower half.
  static TFPAR_INLINE U Upper(U v) {
#if defined(__AVX512F__)
    return reinterpret_cast<U>(_mm512_shuffle_epi32(reinterpret_cast<__m512i>(v), _MM_PERM_DDBB));
#else
    return v >> 32;
#endif
  }
};

struct PhiloxKeys {
  explicit PhiloxKeys(uint64_t seed) {
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < kRounds; ++round) {
      key[round][0] = k0;
      key[round][1] = k1;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
  }
  static constexpr int kRounds = 10;
  uint64_t key[kRounds][2];
};

// The four words of the counters, in the low halves of 64-bit lanes.
struct PhiloxState {
  typedef Lanes64 L;
  L::U c0, c1, c2, c3;

  TFPAR_INLINE PhiloxState(L::U counter, uint64_t step)
      : c0(counter), c1(counter >> 32), c2(L::Splat(step)), c3(L::Splat(step >> 32)) {}

  TFPAR_INLINE void Round(const uint64_t key[2]) {
    const L::U p0 = L::MultiplyLow(c0, L::Splat(0xD2511F53u)), p1 = L::MultiplyLow(c2, L::Splat(0xCD9E8D57u));
    c0 = L::Upper(p1) ^ c1 ^ L::Splat(key[0]);
    c1 = p1;
    c2 = L::Upper(p0) ^ c3 ^ L::Splat(key[1]);
    c3 = p0;
  }
};

// Random numbers of one block, 16 bits each: element p = j + i size / 8 takes the i-th number of counter first + j.
//
// If a block has fewer lanes than a vector (a block of 64 elements has 8, a vector 16), a store also covers numbers of
// the next i, which are overwritten later, and the last store reaches past `size`: `u` has room for the largest block.
constexpr int kSmallestLanes = 64 / 8;
static_assert(Wide::kCount <= 2 * kSmallestLanes, "a store reaches no further than into the numbers of the next i");
void FillRandom(const PhiloxKeys& keys, uint64_t step, int64_t block, int size, uint32_t* __restrict u) {
  typedef Lanes64 L;
  const int lanes = size / 8;
  L::U even{};
  for (int i = 0; i < L::kCount; ++i) even[i] = 2 * static_cast<uint64_t>(i);
  even += L::Splat(static_cast<uint64_t>(block) * static_cast<uint64_t>(lanes));
  for (int j = 0; j < lanes; j += 2 * L::kCount) {
    // Counters of even and odd j are computed separately, so that a shift interleaves their words.
    PhiloxState a(even, step), b(even + 1, step);
    for (int round = 0; round < PhiloxKeys::kRounds; ++round) {
      a.Round(keys.key[round]);
      b.Round(keys.key[round]);
    }
    const L::U* const from[4][2] = {{&a.c0, &b.c0}, {&a.c1, &b.c1}, {&a.c2, &b.c2}, {&a.c3, &b.c3}};
    for (int word = 0; word < 4; ++word) {
      const Wide::U both = reinterpret_cast<Wide::U>((*from[word][0] & 0xFFFFFFFFu) | (*from[word][1] << 32));
      uint32_t* to = u + 2 * word * lanes + j;
      Wide::StoreU(both & 0xFFFFu, to);
      Wide::StoreU(both >> 16, to + lanes);
    }
    even += L::Splat(2 * L::kCount);
  }
}
