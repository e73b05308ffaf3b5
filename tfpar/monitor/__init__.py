"""What one sees: terminal, TensorBoard, summary."""
