"""The sources of examples: arrays, files, tables, texts, generated data, and objects with random access."""
