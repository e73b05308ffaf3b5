// An exchange of an encoded vector between the members of a group, as a call of the mesh.
#ifndef TFPAR_OPS_TRANSPORT_CODED_EXCHANGE_H_
#define TFPAR_OPS_TRANSPORT_CODED_EXCHANGE_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "tfpar_ops/core/codec.h"
#include "tfpar_ops/core/units.h"

namespace tfpar {

// Calls `work` for the units (core/units.h) [0, units), in any order and number of threads, and returns when all are done.
using ForEachUnit = std::function<void(int64_t units, const std::function<void(int64_t)>& work)>;

// A vector of `total` elements, in parts, is cut into one shard of `shard` elements for each member; the last shards may extend
// past its end, or lie beyond it. Member i sums shard i, in the order of the members. The call's `done` owns all pointers.
//
// Payloads are those of FORMAT.md, cut into chunks of whole blocks, which are sent without headers: the key contains the fields
// of a header. Values, residuals and norms have the bits that tfpar_encode, tfpar_recode and tfpar_decode_sum give for whole
// shards.
struct CodedExchange {
  tfpar_codec codec{};  // a format without positions; seed and step of the worker's own payloads
  uint64_t owner_seed = 0;  // for the payloads of the sums; the step is the same
  std::vector<const float*> inputs;
  std::vector<float*> outputs;   // may be the memory of the inputs, part by part
  std::vector<int64_t> offsets;  // as in tfpar_vector: of inputs and outputs
  int64_t total = 0;
  int64_t shard = 0;  // a multiple of the block
  int64_t chunk = 0;  // elements of a chunk, a multiple of kUnitElements; 0 for the size that was measured to be fastest

  // Residuals: of this worker's payloads, [total], and of the sums of its shard, [existing elements of the shard]. Null for
  // none.
  // Old and new may be the same memory.
  const float* worker_residual = nullptr;
  float* new_worker_residual = nullptr;
  const float* owner_residual = nullptr;
  float* new_owner_residual = nullptr;

  bool measures_norms = true;

  int threads = 1;       // number of this worker's exchanges that may compute at the same time
  ForEachUnit for_each;  // null: the thread of the call does all units

  // Results: the squared norms of the input and of the worker's new residual; NaN if they are not measured.
  float norms[2] = {0, 0};
};

}  // namespace tfpar

#endif  // TFPAR_OPS_TRANSPORT_CODED_EXCHANGE_H_
