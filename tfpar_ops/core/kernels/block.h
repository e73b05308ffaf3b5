// Blocks: functions that find them in vectors of many parts, and load, scale, sum and store them. A block that lies in
// one part is used in place; a block that crosses parts, or the end of the vector, is gathered.

// Prefetches data of later blocks while this block is computed. Without it, loads start too late (measured: 70 rather
// than 85 % of the bandwidth of a triad).
struct Ahead {
  static constexpr uintptr_t kBytes = 32768;
  uintptr_t x, residual;  // addresses of this block's data; the prefetch is kBytes further, and may lie past the end

  TFPAR_INLINE void Fetch(int i) const {
    const uintptr_t at = kBytes + static_cast<uintptr_t>(i) * sizeof(float);
    __builtin_prefetch(reinterpret_cast<const void*>(x + at), 0, 2);
    __builtin_prefetch(reinterpret_cast<const void*>(residual + at), 0, 2);
  }
};

// The arguments for encoding one block. Each array has `size` elements, padding included.
struct EncodeBlock {
  const float* x;
  const float* residual;  // may be new_residual, or null
  float* new_residual;
  uint8_t* code;
  uint8_t* scale;
  int64_t index;  // of the block, in the whole vector
  int size;       // a multiple of 64
  int exist;      // elements that are not padding, 0 to size
  bool stream;    // bypass the caches when writing codes: there are many, and their address is a multiple of 16
  Ahead ahead;
};

// The same block in one of several payloads.
struct Source {
  const uint8_t* code;
  const uint8_t* scale;
};

constexpr int kPeersAtOnce = 4;

TFPAR_INLINE int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
TFPAR_INLINE int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }

void Copy(const float* from, int64_t count, float* to) {
  if (count > 0) __builtin_memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
}

void Fill(float value, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = value;
}

// Finds the part of a vector that holds an element. Blocks are visited in order, so it is mostly the previous part.
class Parts {
 public:
  Parts(const int64_t* offset, int64_t parts) : offset_(offset), parts_(parts) {}

  int64_t size() const { return offset_[parts_]; }
  // Finds element `at`, which must exist: its part, its place in that part, and how many elements are left from there.
  void Seek(int64_t at) {
    if (at < offset_[part_] || at >= offset_[part_ + 1]) Search(at);
    place_ = at - offset_[part_];
    left_ = offset_[part_ + 1] - at;
  }
  int64_t part() const { return part_; }
  int64_t place() const { return place_; }
  int64_t left() const { return left_; }

 private:
  void Search(int64_t at) {
    int64_t low = at < offset_[part_] ? 0 : part_ + 1, high = parts_ - 1;
    if (at >= offset_[low] && at < offset_[low + 1]) high = low;
    while (low < high) {  // the last part that begins at or before `at`: earlier parts with the same offset are empty
      const int64_t middle = high - (high - low) / 2;
      if (offset_[middle] <= at) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    part_ = low;
  }

  const int64_t* offset_;
  int64_t parts_;
  int64_t part_ = 0, place_ = 0, left_ = 0;
};

// Elements [at, at + count) of x, then zeros up to `size`. Returns a pointer into x if all `size` elements lie in one
// part; else gathers them in `scratch`.
const float* Gather(const float* const* data, Parts* parts, int64_t at, int64_t count, int64_t size, float* scratch) {
  for (int64_t done = 0; done < count;) {
    parts->Seek(at + done);
    const float* from = data[parts->part()] + parts->place();
    if (done == 0 && parts->left() >= size && count == size) return from;
    const int64_t piece = Min(count - done, parts->left());
    Copy(from, piece, scratch + done);
    done += piece;
  }
  Fill(0.0f, size - count, scratch + count);
  return scratch;
}

// Writes `count` elements to the vector, from element `at` on.
void Scatter(float* const* data, Parts* parts, int64_t at, int64_t count, const float* from) {
  for (int64_t done = 0; done < count;) {
    parts->Seek(at + done);
    const int64_t piece = Min(count - done, parts->left());
    Copy(from + done, piece, data[parts->part()] + parts->place());
    done += piece;
  }
}

template <bool kResidual>
uint32_t LoadSumOf(const EncodeBlock& block, float* __restrict v) {
  typedef Wide L;
  L::U largest = L::SplatU(0);
  for (int i = 0; i < block.size; i += L::kCount) {
    const L::F x = L::Load(block.x + i);
    const L::F sum = L::Flush(kResidual ? L::Add(x, L::Load(block.residual + i)) : x);
    L::Store(sum, v + i);
    largest = L::MaxU(largest, L::Magnitude(sum));
  }
  uint32_t result = 0;
  for (int i = 0; i < L::kCount; ++i) result = largest[i] > result ? largest[i] : result;
  return result;
}

// Pass one of an encoder: computes v = flush(x + r) and returns the largest |v| as bits. The bits of magnitudes compare
// as the magnitudes do, and the bits of infinity and NaN are at least kInfinity.
uint32_t LoadSum(const EncodeBlock& block, float* v) {
  return block.residual != nullptr ? LoadSumOf<true>(block, v) : LoadSumOf<false>(block, v);
}

// A block that is not finite leaves the residual unchanged.
void KeepResidual(const EncodeBlock& block) {
  if (block.residual == nullptr) {
    Fill(0.0f, block.size, block.new_residual);
  } else if (block.new_residual != block.residual) {
    Copy(block.residual, block.size, block.new_residual);
  }
}

// Sum of squares in float64, where no square of a float32 overflows or underflows. The square is exact, so it does not
// matter whether it is fused with the sum. Lane i adds up elements i, i + 32, ..., then lanes are added in pairs: the
// order is the same for every instruction set.
double SumSquares(const float* x, int64_t count) {
  constexpr int kLanes = 32, kWidth = Wide::kCount / 2;  // float64 lanes in total, and per vector
  typedef VectorTypes<kWidth>::F F;
  typedef double D __attribute__((vector_size(8 * kWidth)));
  D sum[kLanes / kWidth] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int k = 0; k < kLanes / kWidth; ++k) {
      F v;
      __builtin_memcpy(&v, x + i + k * kWidth, sizeof v);
#if defined(__AVX512F__)
      const D value = _mm512_cvtps_pd(v);
      sum[k] = _mm512_fmadd_pd(value, value, sum[k]);
#elif defined(__FMA__)
      const D value = _mm256_cvtps_pd(v);
      sum[k] = _mm256_fmadd_pd(value, value, sum[k]);
#else
      const D value = __builtin_convertvector(Lanes<kWidth>::DropDenormal(v), D);
      sum[k] += value * value;
#endif
    }
  }
  double lane[kLanes];
  __builtin_memcpy(lane, sum, sizeof lane);
  for (int l = 0; i < count; ++i, ++l) {
    const double value = DropDenormal(x[i]);
    lane[l] += value * value;
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
  }
  return lane[0];
}

// A block's scale, as FORMAT.md defines it, from a finite s >= 0.
struct Scale {
  float value;
  float inverse;  // 0 for a scale of 0
};

TFPAR_INLINE Scale MakeScale(float s, int scale_bits) {
  uint32_t bits = scale_bits == 16 ? RoundToBf16(s) : RoundToShort(s);
  constexpr uint32_t kLargest = 0x7E800000u;  // 2^126: its inverse is still a normal number
  if (bits > kLargest) bits = kLargest;
  if (bits <= kSmallestNormal) return {0.0f, 0.0f};
  return {Float(bits), 1.0f / Float(bits)};
}

TFPAR_INLINE void WriteScale(float value, int scale_bits, uint8_t* to) {
  if (scale_bits == 16) {
    *reinterpret_cast<AnyU16*>(to) = static_cast<uint16_t>(Bits(value) >> 16);
  } else {
    *reinterpret_cast<AnyU32*>(to) = Bits(value);
  }
}

TFPAR_INLINE float ReadScale(const uint8_t* from, int scale_bits) {
  const uint32_t bits = scale_bits == 16 ? static_cast<uint32_t>(*reinterpret_cast<const AnyU16*>(from)) << 16
                                         : static_cast<uint32_t>(*reinterpret_cast<const AnyU32*>(from));
  return Float((bits & ~kSignBit) < kSmallestNormal ? 0u : bits);
}

// Writes of vectors of more bytes than this bypass the caches: the vectors would be evicted before they are read, and
// fetching the old content costs as much as writing the new content.
constexpr int64_t kStreamBytes = 8 << 20;

// scaled(sum): the product, or 0 if its magnitude is not above 2^-126.
TFPAR_INLINE Wide::F ScaledSum(Wide::F sum, float factor) {
  const Wide::F product = Wide::Mul(sum, Wide::Splat(factor));
  return Wide::Magnitude(product) > Wide::SplatU(kSmallestNormal) ? product : Wide::Splat(0.0f);
}

void ScaleSum(float factor, int size, float* acc) {
  if (factor == 1.0f) return;
  for (int i = 0; i < size; i += Wide::kCount) Wide::Store(ScaledSum(Wide::Load(acc + i), factor), acc + i);
}

// to = from, bypassing the caches except at both ends, where a whole aligned vector does not fit.
void StreamCopy(const float* from, int size, float* to) {
  constexpr int kCount = Wide::kCount;
  const int head = static_cast<int>(-(reinterpret_cast<uintptr_t>(to) / sizeof(float)) & (kCount - 1));
  const int end = head + ((size - head) & -kCount);
  Copy(from, head, to);
  for (int i = head; i < end; i += kCount) Wide::Stream(Wide::Load(from + i), to + i);
  Copy(from + end, size - end, to + end);
}
