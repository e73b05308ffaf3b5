"""Playing a policy with the most likely actions: evaluations, pictures of an episode, and a saved policy by itself."""
