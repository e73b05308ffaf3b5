"""Playing a policy with the most likely actions: evaluations, pictures of an episode, and saved policies."""
