// The meshes of this process by number; operations have the number as an attribute.
#ifndef TFPAR_OPS_TRANSPORT_REGISTRY_H_
#define TFPAR_OPS_TRANSPORT_REGISTRY_H_

#include <cstdint>
#include <memory>

#include "tfpar_ops/transport/mesh.h"

namespace tfpar {

// The mesh with a number; null if it is closed or does not exist, or if another process made it.
std::shared_ptr<Mesh> FindMesh(int64_t number);

}  // namespace tfpar

#endif  // TFPAR_OPS_TRANSPORT_REGISTRY_H_
