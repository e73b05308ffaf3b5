"""Nothing that is read is executed, and no command line is made of what somebody typed."""

from __future__ import annotations

import ast
import json
import pathlib
import zipfile

from tests.test_architecture import modules, relative
from tfpar.checkpoint import run_state
from tfpar.checkpoint.model_files import load_model
from tfpar.config import ConfigError

import keras
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Modules that execute, or import, what they read.
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "torch.load"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "tempfile.mktemp"),
    *("np.load", "numpy.load", "keras.config.enable_unsafe_deserialization"),
}


def name_of(node: ast.expr) -> str:
    """`a.b.c` of a call's function."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def violations(text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [str(node.module)] if str(node.module).split(".")[0] in FORBIDDEN_MODULES else []
        elif isinstance(node, ast.Call):
            name = name_of(node.func)
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            if name in FORBIDDEN_CALLS:
                found.append(name)
            for flag in ("shell", "allow_pickle"):
                value = keywords.get(flag)
                if value is not None and not (isinstance(value, ast.Constant) and value.value is False):
                    found.append(f"{name}({flag}=...)")
            if name.endswith(("saving.load_model", "models.load_model")):
                safe = keywords.get("safe_mode")
                if not (isinstance(safe, ast.Constant) and safe.value is True):
                    found.append(f"{name} without safe_mode=True")
            if name.startswith("subprocess.") and node.args and isinstance(node.args[0], ast.Constant | ast.JoinedStr):
                found.append(f"{name} with a string")
    return found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from yaml import load",
        "eval(text)",
        "os.system(f'rm {path}')",
        "subprocess.run(f'rm {path}', shell=True)",
        "subprocess.run('ls')",
        "np.load(path)",
        "f(path, allow_pickle=flag)",
        "keras.saving.load_model(path)",
        "keras.models.load_model(path, safe_mode=False)",
    ],
)
def test_the_search_finds_what_it_is_for(text):
    assert violations(text)


def test_no_module_executes_what_it_reads_or_builds_command_lines():
    # On what the project gives to users; tests may.
    for path in [*modules("tfpar", "tfpar_ops", "experiments"), ROOT / "setup.py"]:
        assert not violations(path.read_text()), relative(path)


# `.keras` files


def saved_model(path: pathlib.Path, config: dict) -> str:
    """A `.keras` file with another configuration in the place of its own."""
    original = path.with_name("original.keras")
    keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]).save(original)
    with zipfile.ZipFile(original) as source, zipfile.ZipFile(path, "w") as target:
        for entry in source.namelist():
            target.writestr(entry, json.dumps(config) if entry == "config.json" else source.read(entry))
    return str(path)


def calls(module: str, name: str, /, **config) -> dict:
    return {"module": module, "class_name": name, "config": config, "registered_name": None}


def within_a_model(layer: dict) -> dict:
    inputs = calls("keras.layers", "InputLayer", batch_shape=[None, 3], dtype="float32", name="input")
    return calls("keras", "Sequential", name="net", layers=[inputs, layer])


def hostile(mark: pathlib.Path) -> list[dict]:
    """Configurations that leave a mark if any part of them is executed."""
    code = f"import pathlib; pathlib.Path({str(mark)!r}).touch()"
    return [
        calls("builtins", "exec", source=code),
        calls("os", "system", command=f"touch {mark}"),
        calls("pathlib", "Path", path=str(mark)),
        within_a_model(calls("builtins", "exec", source=code)),
        within_a_model(calls("subprocess", "Popen", args=["touch", str(mark)])),
        within_a_model(calls("keras.layers", "Dense", units=1, activation=calls("builtins", "exec", source=code))),
        within_a_model(
            calls("keras.layers", "Dense", units=1, kernel_initializer=calls("os", "system", command=f"touch {mark}"))
        ),
        within_a_model(
            calls("keras.layers", "Lambda", function={"module": "builtins", "class_name": "function", "config": "exec"})
        ),
        within_a_model(calls("keras.src.utils.file_utils", "get_file", fname="x", origin=f"file://{mark}")),
    ]


def test_a_hostile_model_file_is_refused_and_executes_nothing(tmp_path):
    mark = tmp_path / "mark"
    for number, config in enumerate(hostile(mark)):
        file = saved_model(tmp_path / f"{number}.keras", config)
        with pytest.raises(ConfigError, match="cannot be loaded"):
            load_model(file)
        with pytest.raises(ConfigError, match="cannot be loaded"):
            run_state.warm_start(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]), file, print)
        assert not mark.exists(), config


def test_a_lambda_layer_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda x: x + 1), keras.layers.Dense(2)])
    model.save(tmp_path / "lambda.keras")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(str(tmp_path / "lambda.keras"))


def test_a_damaged_model_file_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((30,)), keras.layers.Dense(50)])
    model.save(tmp_path / "whole.keras")
    whole = (tmp_path / "whole.keras").read_bytes()
    wanted = model.get_weights()
    for share in (0.1, 0.5, 0.9, 0.999):
        (tmp_path / "cut.keras").write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ConfigError):
            load_model(str(tmp_path / "cut.keras"))
        flipped = bytearray(whole)
        flipped[int(share * len(whole))] ^= 0x10
        (tmp_path / "flipped.keras").write_bytes(bytes(flipped))
        try:  # a zip has bytes that nobody reads; what loads is what was saved
            loaded = load_model(str(tmp_path / "flipped.keras"))
        except ConfigError:
            continue
        assert all(np.array_equal(one, other) for one, other in zip(loaded.get_weights(), wanted, strict=True))
