// The largest elements of each block. Magnitudes are compared as the integers of their bits.
//
// To find the `keep` largest of B values without sorting: divide the block into groups of several elements each, and
// take the keep-th largest of the groups' maxima. At least `keep` elements reach it, and seldom many more. The exact
// threshold is then searched among these few elements.

struct TopK {
  static constexpr int kLargest = 16384;
  static constexpr int kDepth = 1;

  static int CountAtLeast(const uint32_t* __restrict magnitude, int count, uint32_t threshold) {
    int reach = 0;
    for (int i = 0; i < count; ++i) reach += magnitude[i] >= threshold ? 1 : 0;
    return reach;
  }

  // Returns a threshold t that at least `keep` of the numbers reach, 1 <= keep <= count: either exactly `keep` reach
  // it, or t is the keep-th largest number. The search goes down from `largest`, the largest number, in growing
  // strides, then bisects.
  static uint32_t Threshold(const uint32_t* magnitude, int count, int keep, uint32_t largest) {
    uint32_t low = 0, high = largest + 1;  // enough numbers reach low, too few reach high
    for (uint32_t stride = 1u << 22; stride < high; stride *= 2) {
      const uint32_t probe = high - stride;
      const int reach = CountAtLeast(magnitude, count, probe);
      if (reach == keep) return probe;
      if (reach > keep) {
        low = probe;
        break;
      }
      high = probe;
    }
    if (low == 0 && CountAtLeast(magnitude, count, 1) < keep) return 0;
    while (high - low > 1) {
      const uint32_t middle = low + (high - low) / 2;
      const int reach = CountAtLeast(magnitude, count, middle);
      if (reach == keep) return middle;
      if (reach > keep) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // Number of groups for the first selection: a power of two and at least twice `keep`, so that few of the largest
  // elements share a group. `size`, which means no groups, if groups would have fewer than 4 elements.
  static int Groups(int size, int keep) {
    int groups = 64;
    while (groups < 2 * keep) groups *= 2;
    return groups <= size / 4 ? groups : size;
  }

  // maximum[g]: the largest magnitude of the elements g, g + groups, ... Returns the largest of all.
  static uint32_t GroupMaxima(const float* __restrict v, int size, int groups_any, uint32_t* __restrict maximum) {
    const int groups = groups_any & -64;  // the mask tells the compiler that it is a multiple of 64
    for (int g = 0; g < groups; ++g) maximum[g] = Magnitude(v[g]);
    for (int from = groups; from < size; from += groups) {
      for (int g = 0; g < groups; ++g) {
        const uint32_t magnitude = Magnitude(v[from + g]);
        maximum[g] = magnitude > maximum[g] ? magnitude : maximum[g];
      }
    }
    uint32_t largest = 0;
    for (int g = 0; g < groups; ++g) largest = maximum[g] > largest ? maximum[g] : largest;
    return largest;
  }

  // Sets bit i of `reached` if element i reaches `threshold`.
  static void MarkReaching(const float* v, int size, uint32_t threshold, uint64_t* reached) {
    typedef Wide L;
    for (int word = 0; word < size / 64; ++word) {
      uint64_t bits = 0;
      for (int i = 0; i < 64; i += L::kCount) {
        const L::U magnitude = L::Magnitude(L::Load(v + word * 64 + i));
        bits |= static_cast<uint64_t>(L::MaskAtLeast(magnitude, L::SplatU(threshold))) << i;
      }
      reached[word] = bits;
    }
  }

  // Writes the positions of the marked elements, in rising order, and their magnitudes. Returns their number.
  static int Collect(const float* v, int size, const uint64_t* reached, uint16_t* position, uint32_t* magnitude) {
    int count = 0;
    for (int word = 0; word < size / 64; ++word) {
      for (uint64_t rest = reached[word]; rest != 0; rest &= rest - 1) {
        const int i = word * 64 + __builtin_ctzll(rest);
        position[count] = static_cast<uint16_t>(i);
        magnitude[count++] = Magnitude(v[i]);
      }
    }
    return count;
  }

  // Selects `keep` of the `count` candidates, count > keep: all above the threshold, then the first that equal it.
  static void DropSmallest(const uint32_t* magnitude, int count, int keep, uint32_t largest, const uint16_t* position,
                           AnyU16* kept) {
    const uint32_t threshold = Threshold(magnitude, count, keep, largest);
    int equal = keep - CountAtLeast(magnitude, count, threshold + 1);
    for (int i = 0, done = 0; done < keep; ++i) {
      const int tie = (magnitude[i] == threshold) & (equal > 0);
      equal -= tie;
      kept[done] = position[i];
      done += tie | (magnitude[i] > threshold);
    }
  }

  // Writes `keep` positions in rising order: the `count` given ones, count < keep, and the first of the others.
  static void AddZeros(const uint16_t* position, int count, int keep, AnyU16* kept) {
    int next = 0, done = 0, zeros = keep - count;
    for (int i = 0; done < keep; ++i) {
      if (next < count && position[next] == i) {
        ++next;
      } else if (zeros > 0) {
        --zeros;
      } else {
        continue;
      }
      kept[done++] = static_cast<uint16_t>(i);
    }
  }

  // Writes the positions to keep, in rising order.
  static void Select(const float* v, int size, int keep, AnyU16* kept) {
    alignas(64) uint32_t magnitude[kLargest];  // of the groups first, then of the candidates
    alignas(64) uint16_t position[kLargest];
    uint64_t reached[kLargest / 64];
    const int groups = Groups(size, keep);
    const uint32_t largest = GroupMaxima(v, size, groups, magnitude);
    uint32_t threshold = Threshold(magnitude, groups, keep, largest);
    if (threshold == 0) threshold = 1;  // fewer than `keep` elements are non-zero: AddZeros fills up with zeros
    MarkReaching(v, size, threshold, reached);
    const int count = Collect(v, size, reached, position, magnitude);
    if (count == keep) {
      __builtin_memcpy(kept, position, static_cast<size_t>(keep) * sizeof(uint16_t));
    } else if (count > keep) {
      DropSmallest(magnitude, count, keep, largest, position, kept);
    } else {
      AddZeros(position, count, keep, kept);
    }
  }

  typedef uint32_t Statistic;

  static TFPAR_INLINE Statistic Load(const EncodeBlock& block, float* v) { return LoadSum(block, v); }

  static TFPAR_INLINE void Write(const tfpar_codec& codec, const EncodeBlock& block, const float* v, Statistic largest) {
    const int keep = codec.keep;
    AnyU16* position = reinterpret_cast<AnyU16*>(block.code);
    AnyU16* value = position + keep;
    if (largest >= kInfinity) {
      for (int i = 0; i < keep; ++i) {
        position[i] = static_cast<uint16_t>(i);
        value[i] = Bf16::kNotANumber;
      }
      KeepResidual(block);
      return;
    }
    Select(v, block.size, keep, position);
    for (int i = 0; i < block.size; i += Wide::kCount) {
      block.ahead.Fetch(i);
      Wide::Store(Wide::Load(v + i), block.new_residual + i);
    }
    for (int i = 0; i < keep; ++i) {
      const int at = position[i];
      const uint32_t code = Bf16::Code(v[at]);
      value[i] = static_cast<uint16_t>(code);
      block.new_residual[at] = Flush(Sub(v[at], Bf16::Value(code)));
    }
  }

  // Adds one payload's block to acc. Returns 1 if a position is outside the block.
  static int AddOne(const uint8_t* code, int keep, int size, float* acc) {
    const AnyU16* position = reinterpret_cast<const AnyU16*>(code);
    const AnyU16* value = position + keep;
    int outside = position[0] >= size, disorder = 0;
    for (int i = 1; i < keep; ++i) {
      outside |= position[i] >= size;
      disorder |= position[i] <= position[i - 1];
    }
    const float first = Bf16::Value(value[0]);
    if (first != first) {
      Fill(Float(kNaN), size, acc);
    } else if (outside | disorder) {
      AddDisordered(position, value, keep, size, acc);
    } else {
      for (int i = 0; i < keep; ++i) acc[position[i]] = Add(acc[position[i]], Bf16::Value(value[i]));
    }
    return outside;
  }

  // For a block that no encoder writes: positions may repeat, so their values are summed before they are added to acc.
  static __attribute__((noinline)) void AddDisordered(const AnyU16* position, const AnyU16* value, int keep, int size,
                                                      float* acc) {
    float d[kLargest];
    Fill(0.0f, size, d);
    for (int i = 0; i < keep; ++i) {
      if (position[i] < size) d[position[i]] = Add(d[position[i]], Bf16::Value(value[i]));
    }
    for (int i = 0; i < size; ++i) acc[i] = Add(acc[i], d[i]);
  }

  template <int kPeers, bool kMore>
  static int Sum(const tfpar_codec& codec, const Source* source, int size, float* acc) {
    if (!kMore) Fill(0.0f, size, acc);
    int outside = 0;
    for (int p = 0; p < kPeers; ++p) outside |= AddOne(source[p].code, codec.keep, size, acc);
    return outside;
  }
};
