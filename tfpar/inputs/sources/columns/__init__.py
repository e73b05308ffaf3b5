"""How the values of examples become tensors: items in Python, columns of tables, features of records."""
