// Gives Gloo connections that exist already, in place of those that its pairs would make by themselves.
#ifndef TFPAR_OPS_TRANSPORT_ADOPTED_PAIRS_H_
#define TFPAR_OPS_TRANSPORT_ADOPTED_PAIRS_H_

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace gloo {
namespace transport {
class Context;
}  // namespace transport
}  // namespace gloo

namespace tfpar {

// Makes a context of Gloo whose pairs have these connections. Their descriptors are its own from then on, and are closed where
// it throws std::exception.
//   rank: of this worker.
//   connections: descriptors of TCP connections by rank; of its own rank none.
//   host: numeric address of this machine.
//   timeout: of Gloo's operations that have none of their own.
std::shared_ptr<gloo::transport::Context> Adopt(int rank, std::vector<int> connections, const std::string& host,
                                                std::chrono::milliseconds timeout);

}  // namespace tfpar

#endif  // TFPAR_OPS_TRANSPORT_ADOPTED_PAIRS_H_
