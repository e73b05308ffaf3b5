// The kernels on the CPU: the functions of ../core, distributed over TensorFlow's own threads.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/threadpool.h"
#include "tfpar_ops/core/codec.h"
#include "tfpar_ops/core/units.h"
#include "tfpar_ops/kernels/arguments.h"
#include "tfpar_ops/kernels/codec_kernels.h"

namespace tfpar {
namespace {

constexpr int64_t kSmallestBlock = 64;

// Fewer elements than this are processed by the calling thread: waking another thread costs about as much.
constexpr int64_t kTaskElements = 65536;

using Pool = ::tensorflow::thread::ThreadPool;

// Scheduling parameters for a fixed number of units per task. TensorFlow 2.19 has only the constructor, which later
// versions deprecate in favour of `Fixed`. Overload resolution prefers the version with `int` if it compiles.
template <typename Params>
auto FixedUnits(int64_t units, int) -> decltype(Params::Fixed(units)) {
  return Params::Fixed(units);
}

template <typename Params>
Params FixedUnits(int64_t units, long) {
  return Params(Pool::SchedulingStrategy::kFixedBlockSize, std::nullopt, units);
}

// Calls `work` for the units [0, units), each of about `unit_elements` elements.
void ForEachUnit(OpKernelContext* context, int64_t units, int64_t unit_elements,
                 const std::function<void(int64_t)>& work) {
  const int64_t units_per_task = std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, unit_elements));
  context->device()->tensorflow_cpu_worker_threads()->workers->ParallelFor(
      units, FixedUnits<Pool::SchedulingParams>(units_per_task, 0), [&work](int64_t first, int64_t last) {
        for (int64_t unit = first; unit < last; ++unit) work(unit);
      });
}

// Divides the blocks of payloads of equal length into units. Each unit is a range of blocks of one payload.
class Units {
 public:
  Units(const tfpar_codec& codec, int64_t payloads, int64_t elements)
      : blocks_(tfpar_num_blocks(&codec, elements)),
        unit_blocks_(std::max<int64_t>(1, kUnitElements / codec.block)),
        units_per_payload_((blocks_ + unit_blocks_ - 1) / unit_blocks_),
        count_(payloads * units_per_payload_),
        unit_elements_(std::min(unit_blocks_ * codec.block, elements)) {}

  int64_t count() const { return count_; }
  int64_t elements() const { return unit_elements_; }
  int64_t payload(int64_t unit) const { return unit / units_per_payload_; }
  int64_t first_block(int64_t unit) const { return unit % units_per_payload_ * unit_blocks_; }
  int64_t last_block(int64_t unit) const { return std::min(first_block(unit) + unit_blocks_, blocks_); }

 private:
  int64_t blocks_;
  int64_t unit_blocks_;
  int64_t units_per_payload_;
  int64_t count_;
  int64_t unit_elements_;
};

// Sums of squares, added up block by block within a unit and then unit by unit, so that they are the same for any
// number of threads; NaN if they are not measured.
class Norms {
 public:
  Norms(bool measured, int64_t units) : measured_(measured), partial_(measured ? 2 * units : 0) {}

  // Room for the sums of one unit's blocks.
  struct OfBlocks {
    double values[2 * kUnitElements / kSmallestBlock];
  };

  // Where the core writes them; null if they are not measured.
  double* To(OfBlocks* blocks) const { return measured_ ? blocks->values : nullptr; }

  void Add(int64_t unit, const OfBlocks& blocks, int64_t count) {
    if (!measured_) return;
    double sums[2] = {0, 0};
    for (int64_t i = 0; i < count; ++i) {
      sums[0] += blocks.values[2 * i];
      sums[1] += blocks.values[2 * i + 1];
    }
    partial_[2 * unit] = sums[0];
    partial_[2 * unit + 1] = sums[1];
  }

  void Write(bool has_residual, float* norms) const {
    double sums[2] = {0, 0};
    for (size_t i = 0; i < partial_.size(); ++i) sums[i % 2] += partial_[i];
    if (!measured_) sums[0] = sums[1] = std::numeric_limits<double>::quiet_NaN();
    norms[0] = static_cast<float>(sums[0]);
    norms[1] = has_residual || !measured_ ? static_cast<float>(sums[1]) : 0.0f;
  }

 private:
  bool measured_;
  std::vector<double> partial_;
};

// The error for payloads with a position that is not below the block size. Searches for the first such position again,
// as threads find them in any order.
absl::Status PositionError(const tfpar_codec& codec, const Payloads& payloads) {
  const int64_t blocks = tfpar_num_blocks(&codec, payloads.elements);
  for (size_t row = 0; row < payloads.rows.size(); ++row) {
    char message[256];
    if (tfpar_positions_check(&codec, payloads.rows[row], 0, blocks, message, sizeof(message)) != 0) {
      return Invalid("payloads[", row, "]: ", message);
    }
  }
  return absl::InternalError("payloads: their positions changed while they were read");
}

struct Cpu {
  static absl::Status CheckPayloads(const tfpar_codec& codec, const Payloads& payloads) {
    for (size_t row = 0; row < payloads.rows.size(); ++row) {
      char message[256];
      if (tfpar_payload_check(&codec, payloads.elements, payloads.rows[row], payloads.row_bytes, message,
                              sizeof(message)) != 0) {
        return Invalid("payloads[", row, "]: ", message);
      }
    }
    return absl::OkStatus();
  }

  static absl::Status Encode(OpKernelContext* context, const tfpar_codec& codec, const InputParts& parts,
                             const Shards& shards, const Residual& residual, bool measures_norms, int32_t* payload,
                             float* norms) {
    const Units units(codec, shards.count, shards.elements);
    const tfpar_vector x = parts.vector();
    Norms sums(measures_norms, units.count());
    for (int64_t i = 0; i < shards.count; ++i) tfpar_write_frame(&codec, shards.elements, payload + i * shards.words);
    ForEachUnit(context, units.count(), units.elements(), [&](int64_t unit) {
      const int64_t shard = units.payload(unit);
      const int64_t first = units.first_block(unit), last = units.last_block(unit);
      const int64_t begin = shard * shards.elements;
      const int64_t offset = std::min(begin, shards.total);  // a shard past the end has no residual
      const bool has_residual = residual.old_values != nullptr;
      Norms::OfBlocks of_blocks;
      tfpar_encode(&codec, &x, begin, shards.elements, has_residual ? residual.old_values + offset : nullptr,
                   has_residual ? residual.new_values + offset : nullptr, payload + shard * shards.words, first, last,
                   sums.To(&of_blocks));
      sums.Add(unit, of_blocks, last - first);
    });
    sums.Write(residual.old_values != nullptr, norms);
    return absl::OkStatus();
  }

  static absl::Status Decode(OpKernelContext* context, const tfpar_codec& codec, const Payloads& payloads,
                             const Shards& shards, const float* factor, const OutputParts& parts) {
    const Units units(codec, shards.count, shards.elements);
    const tfpar_mutable_vector out = parts.vector();
    std::atomic<bool> wrong{false};
    ForEachUnit(context, units.count(), units.elements(), [&](int64_t unit) {
      const int64_t shard = units.payload(unit);
      const int64_t first = units.first_block(unit);
      const int64_t last = std::min(units.last_block(unit), tfpar_num_blocks(&codec, shards.valid(shard)));
      if (first >= last) return;  // padding
      if (tfpar_decode_sum(&codec, shards.elements, &payloads.rows[shard], 1, *factor, &out, shard * shards.elements,
                           first, last) != 0) {
        wrong.store(true, std::memory_order_relaxed);
      }
    });
    return wrong ? PositionError(codec, payloads) : absl::OkStatus();
  }

  static absl::Status DecodeSum(OpKernelContext* context, const tfpar_codec& codec, const Payloads& payloads,
                                const float* factor, float* sum) {
    const Units units(codec, 1, payloads.elements);
    OutputParts parts;
    parts.Add(sum, payloads.elements);
    const tfpar_mutable_vector out = parts.vector();
    std::atomic<bool> wrong{false};
    ForEachUnit(context, units.count(), units.elements(), [&](int64_t unit) {
      if (tfpar_decode_sum(&codec, payloads.elements, payloads.rows.data(), payloads.rows.size(), *factor, &out, 0,
                           units.first_block(unit), units.last_block(unit)) != 0) {
        wrong.store(true, std::memory_order_relaxed);
      }
    });
    return wrong ? PositionError(codec, payloads) : absl::OkStatus();
  }

  // Checks the positions of all payloads. Operations that only decode detect wrong positions while decoding.
  static absl::Status CheckPositions(OpKernelContext* context, const tfpar_codec& codec, const Payloads& payloads) {
    if (codec.keep == 0) return absl::OkStatus();  // the codec has no positions
    const Units units(codec, payloads.rows.size(), payloads.elements);
    std::atomic<bool> wrong{false};
    ForEachUnit(context, units.count(), units.elements(), [&](int64_t unit) {
      char message[256];
      if (tfpar_positions_check(&codec, payloads.rows[units.payload(unit)], units.first_block(unit),
                                units.last_block(unit), message, sizeof(message)) != 0) {
        wrong.store(true, std::memory_order_relaxed);
      }
    });
    return wrong ? PositionError(codec, payloads) : absl::OkStatus();
  }

  static absl::Status Recode(OpKernelContext* context, const tfpar_codec& codec, const Payloads& payloads,
                             const float* factor, int64_t valid, int64_t begin, const Residual& residual,
                             bool measures_norms, int32_t* payload, float* norms) {
    // Checked before anything is written: if the check fails, a residual that is updated in place must be unchanged.
    TF_RETURN_IF_ERROR(CheckPositions(context, codec, payloads));
    const Units units(codec, 1, payloads.elements);
    Norms sums(measures_norms, units.count());
    tfpar_write_frame(&codec, payloads.elements, payload);
    ForEachUnit(context, units.count(), units.elements(), [&](int64_t unit) {
      const int64_t first = units.first_block(unit), last = units.last_block(unit);
      Norms::OfBlocks of_blocks;
      tfpar_recode(&codec, payloads.elements, payloads.rows.data(), payloads.rows.size(), *factor, valid, begin,
                   residual.old_values, residual.new_values, payload, first, last,
                   sums.To(&of_blocks));
      sums.Add(unit, of_blocks, last - first);
    });
    sums.Write(residual.old_values != nullptr, norms);
    return absl::OkStatus();
  }

  static absl::Status NormSquared(OpKernelContext* context, const InputParts& parts, float* norm_squared,
                                  bool* finite) {
    const int64_t elements = parts.elements();
    const int64_t units = (elements + kUnitElements - 1) / kUnitElements;
    const tfpar_vector x = parts.vector();
    std::vector<double> partial(units);
    ForEachUnit(context, units, kUnitElements, [&](int64_t unit) {
      const int64_t begin = unit * kUnitElements;
      partial[unit] = tfpar_sum_squares(&x, begin, std::min(begin + kUnitElements, elements));
    });
    double sum = 0;
    for (const double value : partial) sum += value;
    *norm_squared = static_cast<float>(sum);
    *finite = std::isfinite(sum);  // a float64 sum of squares of finite float32 does not overflow
    return absl::OkStatus();
  }
};

TFPAR_REGISTER_KERNELS(::tensorflow::DEVICE_CPU, Cpu);

}  // namespace
}  // namespace tfpar
