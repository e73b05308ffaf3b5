"""How a replica is divided over the model axis: which layers, along which dimension, and what its devices exchange."""
