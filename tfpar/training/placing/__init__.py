"""Places the parts of replicas on one device, or on several devices of a mesh."""
