"""`key=value,key=value`: what arguments mean, and how wrong ones are answered."""

from __future__ import annotations

import json

from tfpar.config import ConfigError, ModelConfig, OptimizerConfig, ScheduleConfig, parse_arguments

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

# key=value,key=value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (" , ", {}),
        ("width=64", {"width": 64}),
        ("rate=1e-3,momentum=0.5", {"rate": 1e-3, "momentum": 0.5}),
        ("a=true,b=True,c=false,d=FALSE", {"a": True, "b": True, "c": False, "d": False}),
        ("a=null,b=None,c=none", {"a": None, "b": None, "c": None}),
        ("activation=gelu", {"activation": "gelu"}),
        ('activation="gelu"', {"activation": "gelu"}),
        ("widths=[64,128],depth=2", {"widths": [64, 128], "depth": 2}),
        ("pairs=[[1,2],[3,4]]", {"pairs": [[1, 2], [3, 4]]}),
        ('table={"a":1,"b":[2,3]},depth=2', {"table": {"a": 1, "b": [2, 3]}, "depth": 2}),
        (" width = 64 , name = a b ", {"width": 64, "name": "a b"}),
        ("pattern=a=b", {"pattern": "a=b"}),
        ("empty=", {"empty": ""}),
        ("_private1=1", {"_private1": 1}),
    ],
)
def test_arguments(text, expected):
    found = parse_arguments("--model_args", text, example="a=1")
    assert found == expected
    assert list(found) == list(expected)
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("width", "'width' is not key=value"),
        ("=3", "'=3' is not key=value"),
        ("width=64,gelu", "'gelu' is not key=value"),
        ("2width=64", "'2width=64' is not key=value"),
        ("wid th=64", "is not key=value"),
        ("width:64", "Write e.g. --model_args=depth=2."),
        ("width=64,width=32", "'width' is given twice"),
    ],
)
def test_malformed_arguments_name_flag_text_and_part(text, part):
    with pytest.raises(ConfigError) as caught:
        parse_arguments("--model_args", text, example="depth=2")
    assert part in str(caught.value)
    assert f"--model_args={text!r}" in str(caught.value)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda children: st.lists(children, max_size=3),
    max_leaves=5,
)
names = st.from_regex(r"[a-z_][a-z_0-9]{0,8}", fullmatch=True)


@settings(max_examples=100, deadline=None)
@given(arguments=st.dictionaries(names, values, max_size=4))
def test_whatever_is_written_as_json_comes_back(arguments):
    text = ",".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())
    assert parse_arguments("--x", text, example="a=1") == arguments


def test_what_stands_before_the_arguments_is_shown_with_them():
    with pytest.raises(ConfigError) as caught:
        parse_arguments("--exchange", "block", example="block=64", prefix="int4:")
    assert str(caught.value) == (
        "--exchange='int4:block': 'block' is not key=value. Write e.g. --exchange=int4:block=64."
    )


@pytest.mark.parametrize(
    ("kind", "flag", "example"),
    [
        (ModelConfig, "model_args", "width=64,activation=gelu"),
        (OptimizerConfig, "optimizer_args", "beta_2=0.95,nesterov=true"),
        (ScheduleConfig, "schedule_args", "milestones=[0.5,0.75],factor=0.1"),
    ],
)
def test_argument_options_are_parsed_when_the_section_is_built(kind, flag, example):
    assert kind(**{flag: "a=1,b=x"}).arguments() == {"a": 1, "b": "x"}
    with pytest.raises(ConfigError) as caught:
        kind(**{flag: "a"})
    assert str(caught.value) == f"--{flag}='a': 'a' is not key=value. Write e.g. --{flag}={example}."
    assert kind(**{flag: example}).arguments()
