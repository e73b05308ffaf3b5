"""The TensorFlow that `python3` imports, as a C++ library: headers, the framework library, and the flags of its ABI."""

_QUESTION = """
import json
import tensorflow as tf
print(json.dumps({
    "include": tf.sysconfig.get_include(),
    "library": tf.sysconfig.get_lib(),
    "version": tf.__version__,
    "abi": tf.sysconfig.CXX11_ABI_FLAG,
}))
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

load("@rules_cc//cc:defs.bzl", "cc_library")

cc_library(
    name = "tensorflow",
    srcs = ["libtensorflow_framework.so.2"],
    hdrs = glob(["include/**"], exclude = ["include/**/*.py", "include/**/* *"]),
    defines = [
        "_GLIBCXX_USE_CXX11_ABI=%d",
        "EIGEN_MAX_ALIGN_BYTES=64",
    ],
    includes = ["include"],
)

exports_files(["facts.json"])
"""

def _installed_tensorflow_impl(ctx):
    python = ctx.os.environ.get("PYTHON_BIN_PATH") or ctx.which("python3")
    if not python:
        fail("python3 is not on the PATH, and PYTHON_BIN_PATH is not set")
    answer = ctx.execute(
        [python, "-c", _QUESTION],
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"},
    )
    if answer.return_code:
        fail("%s cannot import TensorFlow; run `make setup` and put .venv/bin first on the PATH:\n%s" % (python, answer.stderr))
    found = json.decode(answer.stdout.strip().split("\n")[-1])
    ctx.symlink(found["include"], "include")
    ctx.symlink(found["library"] + "/libtensorflow_framework.so.2", "libtensorflow_framework.so.2")
    ctx.file("BUILD.bazel", _BUILD % found["abi"])
    ctx.file("facts.json", json.encode({
        "tensorflow": found["version"],
        "cxx11_abi": found["abi"],
        "compiler": "bazel",
        "cuda": None,
    }) + "\n")

installed_tensorflow = repository_rule(
    implementation = _installed_tensorflow_impl,
    doc = "A repository with the target `tensorflow`, and `facts.json` for `tfpar_ops.library`.",
    environ = ["PATH", "PYTHON_BIN_PATH", "PYTHONPATH", "VIRTUAL_ENV"],
    local = True,
)
