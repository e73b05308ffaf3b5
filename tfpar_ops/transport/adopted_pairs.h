// Makes Gloo use existing connections instead of those that its pairs would open.
#ifndef TFPAR_OPS_TRANSPORT_ADOPTED_PAIRS_H_
#define TFPAR_OPS_TRANSPORT_ADOPTED_PAIRS_H_

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace gloo {
namespace transport {
class Context;
class UnboundBuffer;
}  // namespace transport
}  // namespace gloo

namespace tfpar {

// Creates a Gloo context whose pairs use these connections. It takes ownership of the descriptors, and closes them if it throws
// std::exception.
//   rank: of this worker.
//   connections: descriptors of TCP connections by rank; the one of its own rank is not used.
//   host: numeric address of this machine.
//   timeout: of Gloo's operations that are not given one.
//   silence: after which a connection is lost if the system of the peer does not answer on it, in whole seconds, from 2.
std::shared_ptr<gloo::transport::Context> Adopt(int rank, std::vector<int> connections, const std::string& host,
                                                std::chrono::milliseconds timeout, std::chrono::milliseconds silence);

// Takes a completed receive, or send, of a buffer of such a context, as its waits do; returns false if there is none. Gloo's own
// functions have no way to ask: a wait with no time left that fails closes all connections.
bool TakeReceive(gloo::transport::UnboundBuffer& buffer);
bool TakeSend(gloo::transport::UnboundBuffer& buffer);

}  // namespace tfpar

#endif  // TFPAR_OPS_TRANSPORT_ADOPTED_PAIRS_H_
