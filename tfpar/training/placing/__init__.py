"""Where the parts of replicas lie: on one device, or on several of a mesh."""
