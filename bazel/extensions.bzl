"""What MODULE.bazel needs of tensorflow.bzl. In a file of its own: an old Bazel knows no module extensions."""

load("//bazel:tensorflow.bzl", "installed_tensorflow")

def _tensorflow_impl(_ctx):
    installed_tensorflow(name = "installed_tensorflow")

tensorflow = module_extension(implementation = _tensorflow_impl)
