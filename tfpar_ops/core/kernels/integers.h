// Symmetric integers of 8, 4 and 2 bits with a scale per block, nearest or stochastic.

template <int kBits, bool kStochastic = false>
struct Integers {
  typedef Integers<kBits, true> Stochastic;
  static constexpr int kLargest = 4096;
  static constexpr int kDepth = 2;
  static constexpr int kPlanes = 8 / kBits;
  static constexpr int kQ = (1 << (kBits - 1)) - 1;                  // largest number: 127, 7, 1
  static constexpr int kOffset = kBits == 8 ? 0 : 1 << (kBits - 1);  // q + kOffset is the code
  static constexpr uint32_t kMask = (1u << kBits) - 1u;
  typedef Wide L;

  struct Rounded {
    L::F q;
    L::U code;  // in the low bits
  };

  // kPlain: the integers cannot leave [-Q, Q], see Write. Adding 1.5 * 2^23 rounds off the fraction and leaves the
  // integer in the low bits. kOffset can be part of the addend: it is even, so ties round as before.
  template <bool kPlain>
  static TFPAR_INLINE Rounded Round(L::F v, float inverse, const uint32_t* u) {
    const L::F t = L::Mul(v, L::Splat(inverse));
    L::I q;
    if constexpr (kStochastic) {
      // |t 65536| < 2^23: adding 2^23 of the same sign rounds off the fraction.
      const L::F scaled = L::Mul(t, L::Splat(65536.0f));
      const L::F magic = L::Float((L::Bits(scaled) & kSignBit) | 0x4B000000u);
      q = (L::ToInt((scaled + magic) - magic) + reinterpret_cast<L::I>(L::LoadU(u))) >> 16;
    } else {
      const L::F magic = L::Splat(12582912.0f + kOffset);
      const L::F sum = t + magic;
      if constexpr (kPlain) return {sum - magic, L::Bits(sum)};
      q = reinterpret_cast<L::I>(L::Bits(sum)) - static_cast<int32_t>(0x4B400000 + kOffset);
    }
    q = q > -kQ ? q : L::I{} - kQ;
    q = q < kQ ? q : L::I{} + kQ;
    return {L::FromInt(q), reinterpret_cast<L::U>(q + kOffset)};
  }

  template <bool kPlain>
  static void EncodeLoop(const EncodeBlock& block, const float* __restrict v, const uint32_t* __restrict u, Scale scale) {
    uint8_t* __restrict code = block.code;
    float* __restrict new_r = block.new_residual;
    const Ahead ahead = block.ahead;
    const int plane = block.size / kPlanes;
    for (int j = 0; j < plane; j += L::kCount) {
      L::U bytes = L::SplatU(0);
      TFPAR_UNROLL_PLANES
      for (int k = 0; k < kPlanes; ++k) {
        const int i = j + k * plane;
        ahead.Fetch(i);
        const L::F value = L::Load(v + i);
        const Rounded rounded = Round<kPlain>(value, scale.inverse, u + (kStochastic ? i : 0));
        bytes |= (kBits == 8 ? rounded.code : rounded.code & kMask) << (k * kBits);
        const L::F d = L::Splat(scale.value);
        const L::F rest = kPlain ? L::SubExactProduct(value, rounded.q, d) : L::Sub(value, L::Mul(rounded.q, d));
        L::Store(L::Flush(rest), new_r + i);
      }
      L::StoreBytes(bytes, code + j);
    }
  }

  typedef uint32_t Statistic;

  static TFPAR_INLINE Statistic Load(const EncodeBlock& block, float* v) { return LoadSum(block, v); }

  static TFPAR_INLINE void Write(const tfpar_codec& codec, const EncodeBlock& block, const float* v, Statistic a) {
    alignas(64) uint32_t u[kStochastic ? kLargest : 1];
    static_assert(kLargest >= 7 * kSmallestLanes + Wide::kCount, "FillRandom writes past the end of the smallest block");
    if (a >= kInfinity) {
      constexpr int kZeroCodes = kBits == 8 ? 0x00 : kBits == 4 ? 0x88 : 0xAA;
      __builtin_memset(block.code, kZeroCodes, static_cast<size_t>(block.size / kPlanes));
      WriteScale(Float(kNaN), codec.scale_bits, block.scale);
      KeepResidual(block);
      return;
    }
    const Scale scale = MakeScale(kQ == 1 ? Float(a) : Mul(Float(a), 1.0f / kQ), codec.scale_bits);
    WriteScale(scale.value, codec.scale_bits, block.scale);
    if (kStochastic) FillRandom(PhiloxKeys(codec.seed), codec.step, block.index, block.size, u);
    // The relative error of the scale is below 2^-8, and Q (1 + 2^-8) rounds to Q, unless the scale was capped at
    // 2^126. With |v| up to 2^126, nothing overflows either.
    constexpr uint32_t kLargestPlain = 0x7E800000;
    if (!kStochastic && a <= kLargestPlain) {
      EncodeLoop<true>(block, v, u, scale);
    } else {
      EncodeLoop<false>(block, v, u, scale);
    }
  }

  // Turns the codes of a payload's block into float32: looks them up in a table of the scale's multiples, or computes
  // them.
  struct Decoder {
    static constexpr bool kPick = L::kCanPick<kBits>;

    TFPAR_INLINE void Set(float scale) {
      factor = L::Splat(scale);
      if constexpr (kPick) {
        L::F number{};
        for (int i = 0; i < L::kCount; ++i) number[i] = static_cast<float>((i & static_cast<int>(kMask)) - kOffset);
        factor = L::Mul(number, factor);
      }
    }
    TFPAR_INLINE L::F Value(L::U bytes, int k) const {
      if constexpr (kPick) return L::Pick<kBits>(factor, bytes >> (k * kBits));
      if constexpr (kBits == 8) return L::Mul(L::FromInt(reinterpret_cast<L::I>(bytes)), factor);
      // Where it is, the code is the low end of a fraction: 2^(23 - shift) + code. Shifts and conversions are slower than this.
      const int shift = k * kBits;
      const uint32_t one = static_cast<uint32_t>(127 + 23 - shift) << 23;
      const L::F raised = L::Float((bytes & (kMask << shift)) | one);
      return L::Mul(raised - L::Splat(Float(one) + kOffset), factor);
    }
    L::F factor;
  };

  template <int kPeers, bool kMore>
  static int Sum(const tfpar_codec& codec, const Source* source, int size, float* __restrict acc) {
    const int plane = size / kPlanes;
    Decoder decoder[kPeers];
    const uint8_t* code[kPeers];
    for (int p = 0; p < kPeers; ++p) {
      decoder[p].Set(ReadScale(source[p].scale, codec.scale_bits));
      code[p] = source[p].code;
    }
    for (int j = 0; j < plane; j += L::kCount) {
      L::U bytes[kPeers];
      for (int p = 0; p < kPeers; ++p) {
        bytes[p] = kBits == 8 ? reinterpret_cast<L::U>(L::LoadSignedBytes(code[p] + j)) : L::LoadBytes(code[p] + j);
      }
      TFPAR_UNROLL_PLANES
      for (int k = 0; k < kPlanes; ++k) {
        float* to = acc + j + k * plane;
        L::F sum = decoder[0].Value(bytes[0], k);
        if (kMore) sum = L::Add(L::Load(to), sum);
        TFPAR_UNROLL_PLANES
        for (int p = 1; p < kPeers; ++p) sum = L::Add(sum, decoder[p].Value(bytes[p], k));
        L::Store(sum, to);
      }
    }
    return 0;
  }
};
