// The functions of the table `Kernels`: find each block, pass it to its codec, store the result.

// Calls `action` with an object of the kernel type for the codec's rounding.
template <class Kernel, Rounding kRounding, class Action>
TFPAR_INLINE int WithKernel(const tfpar_codec& codec, const Action& action) {
  if constexpr (kRounding == Rounding::STOCHASTIC) {
    if (codec.stochastic) return action(typename Kernel::Stochastic());
  }
  return action(Kernel());
}

// Calls `action` with an object of the codec's type.
template <class Action>
TFPAR_INLINE int WithCodec(const tfpar_codec& codec, const Action& action) {
  switch (codec.kind) {
#define TFPAR_FORMAT_CASE(ID, name, number, code_bits, codes, scale, smallest_block, largest_block, rounding, Kernel) \
  case TFPAR_##ID:                                                                                                    \
    return WithKernel<Kernel, Rounding::rounding>(codec, action);
    TFPAR_FORMATS(TFPAR_FORMAT_CASE)
#undef TFPAR_FORMAT_CASE
    default:
      return 1;  // no valid codec
  }
}

// The offsets of the blocks of a payload.
struct Layout {
  Layout(const tfpar_codec& codec, int64_t n)
      : code_bytes(CodeBytes(codec)), scale_bytes(ScaleBytes(codec)), scales(ScalesAt(codec, n)) {}

  int64_t code(int64_t block) const { return kHeaderBytes + block * code_bytes; }
  int64_t scale(int64_t block) const { return scales + block * scale_bytes; }

  int64_t code_bytes, scale_bytes, scales;
};

// A payload being written, and its residual.
struct Target {
  const tfpar_codec& codec;
  Layout layout;
  uint8_t* payload;
  const float* residual;
  float* new_residual;
  int64_t valid;        // elements that exist
  int64_t first_index;  // of block 0, in the whole vector
  int64_t first_block;  // the block that norms[0] belongs to
  double* norms;
  bool stream;  // see EncodeBlock
};

// Whether writing the codes of n elements at `payload` should bypass the caches.
bool StreamsCodes(const tfpar_codec& codec, int64_t n, const void* payload) {
  return reinterpret_cast<uintptr_t>(payload) % 16 == 0 && NumBlocks(codec, n) > kStreamBytes / CodeBytes(codec);
}

// Encodes each block in two stages: `Load` computes v and the statistic that decides the scale, `Write` writes the
// codes. If the codec has kDepth 2, a block is written after the next one has been loaded: the processor then computes
// one block while the memory delivers the other, and does not wait for a scale.
template <class Codec>
class Encoder {
 public:
  explicit Encoder(const Target& to) : to_(to) {}

  // x: the block's elements, padding included; not used after the call. source: the memory to prefetch from.
  TFPAR_INLINE void Push(int64_t index, const float* x, const void* source) {
    Load(index, x, source, &slot_[which_]);
    if (Codec::kDepth == 1) {
      Write(slot_[0]);
    } else {
      if (pending_) Write(slot_[1 - which_]);
      pending_ = true;
      which_ = 1 - which_;
    }
  }

  TFPAR_INLINE void Finish() {
    if (pending_) Write(slot_[1 - which_]);
  }

 private:
  struct Slot {
    EncodeBlock block;
    int64_t index;
    typename Codec::Statistic statistic;
    alignas(64) float v[Codec::kLargest];
    alignas(64) float residual[Codec::kLargest];  // for a block without a residual, or an incomplete block
  };

  void Load(int64_t index, const float* x, const void* source, Slot* slot) {
    const int size = to_.codec.block;
    const int64_t at = index * size;
    const int exist = static_cast<int>(Max(0, Min(size, to_.valid - at)));
    const bool whole = exist == size;
    EncodeBlock& block = slot->block;
    block.x = x;
    block.residual = to_.residual == nullptr || !whole ? nullptr : to_.residual + at;
    block.new_residual = to_.new_residual == nullptr || !whole ? slot->residual : to_.new_residual + at;
    block.code = to_.payload + to_.layout.code(index);
    block.scale = to_.payload + to_.layout.scale(index);
    block.index = to_.first_index + index;
    block.size = size;
    block.exist = exist;
    block.stream = to_.stream;
    block.ahead = {reinterpret_cast<uintptr_t>(source), reinterpret_cast<uintptr_t>(block.new_residual)};
    slot->index = index;
    if (!whole && to_.residual != nullptr) {
      if (exist > 0) Copy(to_.residual + at, exist, slot->residual);  // else `at` may lie past its end
      Fill(0.0f, size - exist, slot->residual + exist);
      block.residual = slot->residual;
    }
    if (to_.norms != nullptr) to_.norms[2 * (index - to_.first_block)] = SumSquares(x, exist);
    slot->statistic = Codec::Load(block, slot->v);
  }

  void Write(const Slot& slot) {
    const EncodeBlock& block = slot.block;
    Codec::Write(to_.codec, block, slot.v, slot.statistic);
    if (to_.norms != nullptr) to_.norms[2 * (slot.index - to_.first_block) + 1] = SumSquares(block.new_residual, block.exist);
    if (block.exist > 0 && block.exist < block.size && to_.new_residual != nullptr) {
      Copy(slot.residual, block.exist, to_.new_residual + slot.index * block.size);
    }
  }

  const Target& to_;
  bool pending_ = false;
  int which_ = 0;
  Slot slot_[Codec::kDepth];
};

// acc = sum of block `index` of the payloads.
template <class Codec>
__attribute__((noinline)) int SumPayloads(const tfpar_codec& codec, const Layout& layout, const void* const* payloads, int64_t peers,
                             int64_t index, float* acc) {
  if (peers <= 0) Fill(0.0f, codec.block, acc);
  int failed = 0;
  for (int64_t done = 0; done < peers;) {
    Source source[kPeersAtOnce];
    const int64_t left = peers - done;
    const int count = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    for (int p = 0; p < count; ++p) {
      const uint8_t* payload = static_cast<const uint8_t*>(payloads[done + p]);
      source[p] = {payload + layout.code(index), payload + layout.scale(index)};
    }
    const int size = codec.block;
    if (done == 0) {
      failed |= count == 4   ? Codec::template Sum<4, false>(codec, source, size, acc)
                : count == 2 ? Codec::template Sum<2, false>(codec, source, size, acc)
                             : Codec::template Sum<1, false>(codec, source, size, acc);
    } else {
      failed |= count == 4   ? Codec::template Sum<4, true>(codec, source, size, acc)
                : count == 2 ? Codec::template Sum<2, true>(codec, source, size, acc)
                             : Codec::template Sum<1, true>(codec, source, size, acc);
    }
    done += count;
  }
  return failed;
}

void Encode(const tfpar_codec& codec, const tfpar_vector& x, int64_t begin, int64_t n, const float* residual,
            float* new_residual, void* payload, int64_t first_block, int64_t last_block, double* norms) {
  const int64_t valid = Max(0, Min(n, x.offset[x.parts] - begin));
  const Target to = {codec, Layout(codec, n), static_cast<uint8_t*>(payload), residual, new_residual, valid,
                     begin / codec.block, first_block, norms, StreamsCodes(codec, n, payload)};
  WithCodec(codec, [&](auto type) {
    using Codec = decltype(type);
    alignas(64) float gathered[Codec::kLargest];
    Parts parts(x.offset, x.parts);
    Encoder<Codec> encoder(to);
    for (int64_t index = first_block; index < last_block; ++index) {
      const int64_t at = index * codec.block;
      const int64_t exist = Max(0, Min(codec.block, valid - at));
      const float* block = Gather(x.data, &parts, begin + at, exist, codec.block, gathered);
      encoder.Push(index, block, block);
    }
    encoder.Finish();
    if (to.stream) EndStreams();
    return 0;
  });
}

int DecodeSum(const tfpar_codec& codec, int64_t n, const void* const* payloads, int64_t peers, float factor,
              const tfpar_mutable_vector& out, int64_t begin, int64_t first_block, int64_t last_block) {
  const Layout layout(codec, n);
  return WithCodec(codec, [&](auto type) {
    using Codec = decltype(type);
    alignas(64) float scratch[Codec::kLargest];
    Parts parts(out.offset, out.parts);
    const bool stream = kCanStream && parts.size() > kStreamBytes / static_cast<int64_t>(sizeof(float));
    int failed = 0;
    for (int64_t index = first_block; index < last_block; ++index) {
      const int64_t at = begin + index * codec.block;
      const int64_t count = Max(0, Min(Min(codec.block, n - index * codec.block), parts.size() - at));
      float* whole = nullptr;  // the block in `out`, if it lies in one part
      if (count == codec.block) {
        parts.Seek(at);
        if (parts.left() >= count) whole = out.data[parts.part()] + parts.place();
      }
      float* acc = whole != nullptr && !stream ? whole : scratch;
      failed |= SumPayloads<Codec>(codec, layout, payloads, peers, index, acc);
      ScaleSum(factor, codec.block, acc);
      if (whole == nullptr) {
        Scatter(out.data, &parts, at, count, scratch);
      } else if (stream) {
        StreamCopy(scratch, codec.block, whole);
      }
    }
    if (stream) EndStreams();
    return failed;
  });
}

int Recode(const tfpar_codec& codec, int64_t n, const void* const* payloads, int64_t peers, float factor, int64_t valid,
           int64_t begin, const float* residual, float* new_residual, void* payload, int64_t first_block,
           int64_t last_block, double* norms) {
  const Layout layout(codec, n);
  const Target to = {codec, layout, static_cast<uint8_t*>(payload), residual, new_residual, valid, begin / codec.block,
                     first_block, norms, StreamsCodes(codec, n, payload)};
  return WithCodec(codec, [&](auto type) {
    using Codec = decltype(type);
    alignas(64) float acc[Codec::kLargest];
    Encoder<Codec> encoder(to);
    int failed = 0;
    for (int64_t index = first_block; index < last_block; ++index) {
      failed |= SumPayloads<Codec>(codec, layout, payloads, peers, index, acc);
      ScaleSum(factor, codec.block, acc);
      const int64_t exist = Max(0, Min(codec.block, valid - index * codec.block));
      Fill(0.0f, codec.block - exist, acc + exist);
      encoder.Push(index, acc, static_cast<const uint8_t*>(payloads[0]) + layout.code(index));
    }
    encoder.Finish();
    if (to.stream) EndStreams();
    return failed;
  });
}

// Sums pieces of a fixed length from `begin` on, each independently, so that the result does not depend on the parts.
double SumSquaresOfRange(const tfpar_vector& x, int64_t begin, int64_t end) {
  constexpr int64_t kPiece = 4096;
  alignas(64) float gathered[kPiece];
  Parts parts(x.offset, x.parts);
  double total = 0.0;
  for (int64_t at = begin; at < end; at += kPiece) {
    const int64_t count = Min(kPiece, end - at);
    total += SumSquares(Gather(x.data, &parts, at, count, count, gathered), count);
  }
  return total;
}

void Triad(float a, const float* __restrict x, float* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = a * x[i] + y[i];
}
