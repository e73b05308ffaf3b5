// The meshes of this process by their numbers, which operations have as an attribute.
#ifndef TFPAR_OPS_TRANSPORT_REGISTRY_H_
#define TFPAR_OPS_TRANSPORT_REGISTRY_H_

#include <cstdint>
#include <memory>

#include "tfpar_ops/transport/mesh.h"

namespace tfpar {

// The mesh with a number; null where it is closed, or never was.
std::shared_ptr<Mesh> FindMesh(int64_t number);

}  // namespace tfpar

#endif  // TFPAR_OPS_TRANSPORT_REGISTRY_H_
