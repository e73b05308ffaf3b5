"""Places the work of a run on devices."""
