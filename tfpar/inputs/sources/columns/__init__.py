"""Converts the values of examples to tensors: items in Python, columns of tables, features of records."""
