// One exchange of a vector between the members of a group, encoded, as a call of the mesh.
#ifndef TFPAR_OPS_TRANSPORT_CODED_EXCHANGE_H_
#define TFPAR_OPS_TRANSPORT_CODED_EXCHANGE_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "tfpar_ops/core/codec.h"

namespace tfpar {

// Units of work on codecs: so many elements, whatever the number of threads, so that norms never depend on it.
constexpr int64_t kUnitElements = 32768;

// Calls `work` for the units [0, units), in any order and number of threads, and returns when all are done.
using ForEachUnit = std::function<void(int64_t units, const std::function<void(int64_t)>& work)>;

// A vector of `total` elements, in parts, is cut into a shard of `shard` elements for each member; the last ones may reach
// past its end, or lie there. Member i sums shard i, in the order of the members. All pointers are kept by the call's `done`.
//
// Payloads are those of FORMAT.md, cut into chunks of whole blocks that travel without headers: what a header says is in the
// key. Values, residuals and norms have the bits that tfpar_encode, tfpar_recode and tfpar_decode_sum give for whole shards.
struct CodedExchange {
  tfpar_codec codec{};  // a format without positions; seed and step of the worker's own payloads
  uint64_t owner_seed = 0;  // of the sums; they have the same step
  std::vector<const float*> inputs;
  std::vector<float*> outputs;   // may be the memory of the inputs, part by part
  std::vector<int64_t> offsets;  // as in tfpar_vector: of inputs and outputs
  int64_t total = 0;
  int64_t shard = 0;  // a multiple of the block
  int64_t chunk = 0;  // elements of a chunk, a multiple of kUnitElements; 0 for what was measured to be best

  // What payloads leave out: of this worker, [total], and of its shard's owner, [what exists of the shard]. Null for none.
  // Old and new may be the same memory.
  const float* worker_residual = nullptr;
  float* new_worker_residual = nullptr;
  const float* owner_residual = nullptr;
  float* new_owner_residual = nullptr;

  int threads = 1;       // of this worker's exchanges that may compute at a time
  ForEachUnit for_each;  // null: the thread of the call does them all

  // Results: the squared norms of the input and of the worker's new residual.
  float norms[2] = {0, 0};
};

}  // namespace tfpar

#endif  // TFPAR_OPS_TRANSPORT_CODED_EXCHANGE_H_
