"""Plays episodes with a policy's most likely actions: evaluations, pictures of an episode, and saved policies."""
