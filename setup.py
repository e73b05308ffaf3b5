"""Packaging of tfpar."""

import pathlib

from setuptools import find_packages, setup

# Bounds: the training step builds on parts of TensorFlow and Keras that are not public API (each use names the version
# it was read in), so a new minor version is a new version to test, not one to drift into.
INSTALL = [
    "tensorflow>=2.21,<2.22",
    "keras>=3.15,<3.16",
    "tensorflow-datasets>=4.9.9,<5",
    "absl-py>=2.1,<3",
    "tensorboard>=2.20,<2.22",
    "numpy>=1.26,<3",
    "safetensors>=0.5,<1",  # checkpoints: bytes with a JSON header, nothing that can execute
    "scikit-learn>=1.5,<2",  # ships the digits data set
    "pillow>=10,<14",  # TFDS decodes and TensorBoard encodes images with it
]
ONNX = ["tf2onnx>=1.16,<2", "onnxruntime>=1.20,<2"]
TEST = [
    *ONNX,
    "hypothesis>=6.100,<7",
    "import-linter>=2.1,<3",
    "mypy>=1.14,<3",
    "pytest>=8.3,<10",
    "pytest-timeout>=2.3,<3",
    "pytest-xdist>=3.6,<4",
    "ruff==0.17.5",  # exact: another version formats differently
]

setup(
    name="tfpar",
    version="0.1.0",
    description="TensorFlow-native parallel training for Keras 3: one custom loop from one device to a cluster",
    long_description=pathlib.Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["tfpar", "tfpar.*", "tfpar_ops", "tfpar_ops.*"]),
    package_data={"tfpar": ["py.typed"], "tfpar_ops": ["py.typed"]},
    install_requires=INSTALL,
    extras_require={"onnx": ONNX, "test": TEST},
)
