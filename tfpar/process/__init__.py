"""This process, whatever it does: exit codes, start-up messages, output that may fail."""
