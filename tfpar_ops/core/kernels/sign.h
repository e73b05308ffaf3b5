// One bit per element, and the mean magnitude of a block as its scale.

struct Sign {
  static constexpr int kLargest = 4096;
  static constexpr int kDepth = 2;
  static constexpr int kPlanes = 8;

  typedef float Statistic;

  // The remaining halvings, for 2 kHalf numbers.
  template <int kHalf>
  static TFPAR_INLINE float HalveTo(float* sum) {
    if constexpr (kHalf == 1) {
      return Add(sum[0], sum[1]);
    } else {
      typedef Lanes<kHalf> L;
      L::Store(L::Add(L::Load(sum), L::Load(sum + kHalf)), sum);
      return HalveTo<kHalf / 2>(sum);
    }
  }

  // Computes v = flush(x + r) and returns the sum of |v| by halving, in the order of FORMAT.md: first adds the two
  // halves of the block lane by lane, then the two halves of that sum, and so on.
  template <bool kResidual>
  static float LoadTotal(const EncodeBlock& block, float* __restrict v) {
    typedef Wide L;
    if (block.size < 64) __builtin_unreachable();
    alignas(64) float sum[kLargest / 2];
    int half = block.size / 2;
    for (int i = 0; i < half; i += L::kCount) {
      L::F magnitude[2];
      for (int k = 0; k < 2; ++k) {
        const int at = i + k * half;
        const L::F x = L::Load(block.x + at);
        const L::F value = L::Flush(kResidual ? L::Add(x, L::Load(block.residual + at)) : x);
        L::Store(value, v + at);
        magnitude[k] = L::Float(L::Magnitude(value));
      }
      L::Store(L::Add(magnitude[0], magnitude[1]), sum + i);
    }
    for (half /= 2; half >= L::kCount; half /= 2) {
      for (int i = 0; i < half; i += L::kCount) L::Store(L::Add(L::Load(sum + i), L::Load(sum + i + half)), sum + i);
    }
    return HalveTo<Wide::kCount / 2>(sum);
  }

  static TFPAR_INLINE Statistic Load(const EncodeBlock& block, float* v) {
    return block.residual != nullptr ? LoadTotal<true>(block, v) : LoadTotal<false>(block, v);
  }

  // v contains neither NaN nor -0, so the sign bit is set exactly if v < 0, and it is also the sign of d. (With a scale
  // of 0, d may be -0 here; v - d is flushed, so this makes no difference.)
  template <class L>
  static void EncodeLoop(const EncodeBlock& block, const float* __restrict v, float scale) {
    uint8_t* __restrict code = block.code;
    float* __restrict new_r = block.new_residual;
    const Ahead ahead = block.ahead;
    const int plane = block.size / kPlanes;
    for (int j = 0; j < plane; j += L::kCount) {
      typename L::U bytes = L::SplatU(0);
      TFPAR_UNROLL_PLANES
      for (int k = 0; k < kPlanes; ++k) {
        const int i = j + k * plane;
        ahead.Fetch(i);
        const typename L::F value = L::Load(v + i);
        const typename L::U bits = L::Bits(value);
        bytes |= (bits >> (31 - k)) & (1u << k);
        const typename L::F d = L::Float((bits & kSignBit) | L::Bits(L::Splat(scale)));
        L::Store(L::Flush(L::Sub(value, d)), new_r + i);
      }
      L::StoreBytes(bytes, code + j);
    }
  }

  // The bits of a block that is not finite, where v may be NaN.
  static void EncodeSigns(const float* __restrict v, int size, uint8_t* __restrict code) {
    const int plane = size / kPlanes;
    for (int j = 0; j < plane; ++j) {
      uint32_t byte = 0;
      for (int k = 0; k < kPlanes; ++k) byte |= (v[j + k * plane] < 0.0f ? 1u : 0u) << k;
      code[j] = static_cast<uint8_t>(byte);
    }
  }

  static TFPAR_INLINE void Write(const tfpar_codec& codec, const EncodeBlock& block, const float* v, Statistic total) {
    if (Magnitude(total) >= kInfinity) {
      EncodeSigns(v, block.size, block.code);
      WriteScale(Float(kNaN), codec.scale_bits, block.scale);
      KeepResidual(block);
      return;
    }
    const float count = static_cast<float>(block.exist > 0 ? block.exist : 1);  // a block of padding: total and scale are 0
    const Scale scale = MakeScale(Mul(total, 1.0f / count), codec.scale_bits);
    WriteScale(scale.value, codec.scale_bits, block.scale);
    if (block.size / kPlanes % Wide::kCount == 0) {
      EncodeLoop<Wide>(block, v, scale.value);
    } else {
      EncodeLoop<Narrow>(block, v, scale.value);
    }
  }

  // +scale for bit 0, -scale for bit 1: selected by comparison, or looked up in a table with two bits. The upper bit
  // belongs to another element, so the table has the two scales twice.
  template <class L>
  struct Decoder {
    static constexpr bool kPick = L::template kCanPick<2>;

    TFPAR_INLINE void Set(float scale) {
      positive = L::Splat(scale);
      negative = L::Splat(0.0f) - positive;  // +0 for a scale of 0
      if constexpr (kPick) {
        for (int i = 1; i < L::kCount; i += 2) positive[i] = negative[i];
      }
    }
    TFPAR_INLINE typename L::F Value(typename L::U bytes, int k) const {
      if constexpr (kPick) return L::template Pick<2>(positive, bytes >> k);
      return (bytes & (1u << k)) != 0 ? negative : positive;
    }
    typename L::F positive, negative;
  };

  template <int kPeers, bool kMore, class L>
  static void SumLoop(const tfpar_codec& codec, const Source* source, int size, float* __restrict acc) {
    const int plane = size / kPlanes;
    Decoder<L> decoder[kPeers];
    const uint8_t* code[kPeers];
    for (int p = 0; p < kPeers; ++p) {
      decoder[p].Set(ReadScale(source[p].scale, codec.scale_bits));
      code[p] = source[p].code;
    }
    for (int j = 0; j < plane; j += L::kCount) {
      typename L::U bytes[kPeers];
      for (int p = 0; p < kPeers; ++p) bytes[p] = L::LoadBytes(code[p] + j);
      TFPAR_UNROLL_PLANES
      for (int k = 0; k < kPlanes; ++k) {
        float* to = acc + j + k * plane;
        typename L::F sum = decoder[0].Value(bytes[0], k);
        if (kMore) sum = L::Add(L::Load(to), sum);
        TFPAR_UNROLL_PLANES
        for (int p = 1; p < kPeers; ++p) sum = L::Add(sum, decoder[p].Value(bytes[p], k));
        L::Store(sum, to);
      }
    }
  }

  template <int kPeers, bool kMore>
  static int Sum(const tfpar_codec& codec, const Source* source, int size, float* __restrict acc) {
    if (size / kPlanes % Wide::kCount == 0) {
      SumLoop<kPeers, kMore, Wide>(codec, source, size, acc);
    } else {
      SumLoop<kPeers, kMore, Narrow>(codec, source, size, acc);
    }
    return 0;
  }
};
