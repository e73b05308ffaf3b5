// How work on a long vector is divided.
#ifndef TFPAR_OPS_CORE_UNITS_H_
#define TFPAR_OPS_CORE_UNITS_H_

#include <cstdint>

namespace tfpar {

// A unit of work on codecs has this many elements, for any number of threads, so that sums of squares do not depend on it: they
// have the same bits in the operations of the codecs and in the exchange of the transport. A unit is 128 KB of gradient: small
// enough that a few threads share the units evenly, and large enough that the cost of scheduling one is negligible.
constexpr int64_t kUnitElements = 32768;

}  // namespace tfpar

#endif  // TFPAR_OPS_CORE_UNITS_H_
