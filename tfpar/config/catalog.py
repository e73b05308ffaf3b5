"""Names that options take and that come with tfpar, for a quick answer to a wrong one.

What there really is, the registries say: a program may add to them. They live beside code that needs TensorFlow, which
takes seconds to load, so commands that cannot have added anything look here first. A test compares the two.
"""

from __future__ import annotations

import sys

from tfpar.config.errors import unknown_name
from tfpar.config.experiment import ExperimentConfig
from tfpar.config.sections import CUSTOM
from tfpar_ops.formats import FORMATS

# For each option: the module that registers more names, and the names that come with tfpar, without the part after a
# colon.
BUILT_IN = {
    "model": (
        "tfpar.models",
        (
            *("convnet", "mlp", "resnet18", "resnet34", "resnet50", "transformer_lm_gpt2", "transformer_lm_small"),
            *("transformer_lm_tiny", "vit", "vit_base", "vit_small", "vit_tiny"),
        ),
    ),
    "optimizer": (
        "tfpar.optim",
        (
            "adadelta",
            "adafactor",
            "adagrad",
            "adam",
            "adamax",
            "adamw",
            "ftrl",
            "lamb",
            "lars",
            "lion",
            "muon",
            "nadam",
            "rmsprop",
            "sgd",
        ),
    ),
    "schedule": ("tfpar.optim", ("constant", "cosine", "cyclic", "one_cycle", "plateau", "step")),
    "exchange": ("tfpar.exchange", (*FORMATS, "auto", "none", "powersgd")),
    "dataset": ("tfpar.inputs", ("csv", "digits", "images", "parquet", "synthetic", "text", "tfds", "tfrecord")),
}


def check_built_in(config: ExperimentConfig) -> None:
    """Refuses names that do not come with tfpar, for options whose module is not imported, so that no name can have
    been added.

    Raises:
      ConfigError: Names the nearest ones.
    """
    options = config.as_flat_dict()
    for option, (module, names) in BUILT_IN.items():
        name = str(options[option]).partition(":")[0]
        if module not in sys.modules and name not in (*names, CUSTOM):
            raise unknown_name(f"--{option}", name, names)
