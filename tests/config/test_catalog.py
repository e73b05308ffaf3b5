"""Names that come with tfpar: those of the registries, and refused without TensorFlow."""

from __future__ import annotations

import subprocess
import sys

from tests import nursery
from tests.nursery import ROOT
from tfpar import inputs, models
from tfpar.config import ConfigError, ExperimentConfig, catalog
from tfpar.exchange import registry
from tfpar.optim import optimizers, schedules

import pytest


def test_the_names_are_those_of_the_registries():
    """Other tests may have added some."""
    found = {
        "model": models.names(),
        "optimizer": optimizers.OPTIMIZERS,
        "schedule": schedules._BUILDERS,
        "exchange": registry.names(),
        "dataset": inputs.kinds(),
    }
    assert found.keys() == catalog.BUILT_IN.keys()
    for option, (_, names) in catalog.BUILT_IN.items():
        assert set(names) <= set(found[option]), option
        config = ExperimentConfig().as_flat_dict()
        assert str(config[option]).partition(":")[0] in names


def test_nothing_comes_with_tfpar_that_the_catalog_does_not_have():
    code = (
        "from tfpar import inputs, models\n"
        "from tfpar.optim import optimizers, schedules\n"
        "from tfpar.exchange import registry\n"
        "found = models.names(), optimizers.OPTIMIZERS, schedules._BUILDERS, registry.names(), inputs.kinds()\n"
        "from tfpar.config.catalog import BUILT_IN\n"
        "names = [BUILT_IN[option][1] for option in ('model', 'optimizer', 'schedule', 'exchange', 'dataset')]\n"
        "assert [sorted(each) for each in found] == [sorted(each) for each in names], found"
    )
    nursery.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train image --model=resnet", "--model='resnet' is not known. Did you mean 'resnet50'"),
        ("train language --optimizer=adamm", "--optimizer='adamm' is not known. Did you mean"),
        ("train image --exchange=int9:block=64", "--exchange='int9' is not known"),
        ("train image --dataset=digit", "--dataset='digit' is not known"),
        ("train image --schedule=cosin", "--schedule='cosin' is not known"),
        ("evaluate", "--model_file is missing"),
        ("evaluate --model_file=nowhere.keras", "--model_file=nowhere.keras does not exist"),
        ("export --model_file=nowhere.keras --output=nowhere", "--model_file=nowhere.keras does not exist"),
    ],
)
def test_a_wrong_name_is_refused_without_tensorflow(command, message):
    code = (
        "import sys\n"
        "sys.modules['tensorflow'] = None  # importing it, or Keras, is an error\n"
        "from tfpar.commands import cli\n"
        f"sys.exit(cli.main({command.split()!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr


def test_a_program_that_may_have_added_names_is_not_refused():
    catalog.check_built_in(ExperimentConfig.from_flat_dict({"model": "mine", "dataset": "mine:3"}))


def test_names_are_checked_where_nothing_was_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "tfpar.models")
    with pytest.raises(ConfigError, match="--model='mine'"):
        catalog.check_built_in(ExperimentConfig.from_flat_dict({"model": "mine"}))
