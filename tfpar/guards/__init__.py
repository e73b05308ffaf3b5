"""What keeps a run honest: non-finite steps, bad examples, stalls, preemption."""
