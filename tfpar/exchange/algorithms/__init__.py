"""How one bucket of gradients is summed over the workers."""
