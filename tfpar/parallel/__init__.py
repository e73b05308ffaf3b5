"""How work is laid out over devices."""
