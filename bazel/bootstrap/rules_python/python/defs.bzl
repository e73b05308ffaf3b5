"""The Python rules that this Bazel has built in, under the name that later ones fetch them by."""

py_binary = native.py_binary
py_library = native.py_library
py_test = native.py_test
