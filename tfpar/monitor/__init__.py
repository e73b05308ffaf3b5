"""Output for users: terminal, TensorBoard, summary."""
