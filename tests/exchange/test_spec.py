"""What --exchange may say."""

from __future__ import annotations

import dataclasses

from tfpar.config import ConfigError
from tfpar.exchange import registry
from tfpar.exchange import spec as specs
from tfpar.exchange.options import Options

import pytest


@pytest.mark.parametrize("name", registry.names())
def test_every_name_stands_alone(name):
    spec = specs.parse(name)
    assert spec.name == name
    assert (spec.options.codec is None) == (name in ("none", "powersgd", "auto"))
    assert getattr(spec.options, "pattern", "two_phase") == "two_phase"
    assert spec.options.error_feedback


def test_options_go_to_the_codec_and_to_the_exchange():
    spec = specs.parse("int4:block=128,rounding=stochastic,pattern=all_gather,error_feedback=false,warmup_steps=10")
    options = spec.options
    assert (options.codec.bits, options.codec.block, options.codec.rounding) == (4, 128, "stochastic")
    assert (options.pattern, options.error_feedback, options.warmup_steps) == ("all_gather", False, 10)


@pytest.mark.parametrize(
    ("text", "keep", "block"),
    [("topk:0.01", 41, 4096), ("topk", 41, 4096), ("topk:1", 4096, 4096), ("topk:0.05,block=256", 13, 256)],
)
def test_topk_takes_the_share_it_keeps(text, keep, block):
    codec = specs.parse(text).options.codec
    assert (codec.keep, codec.block) == (keep, block)


@pytest.mark.parametrize(
    ("text", "same"),
    [("topk:block=64,share=0.1", "topk:0.1,block=64"), ("powersgd:rank=2", "powersgd:2"), ("topk:share=1", "topk:1")],
)
def test_the_first_option_may_have_its_name(text, same):
    assert specs.parse(text).options == specs.parse(same).options


@pytest.mark.parametrize("name", [name for name in registry.names() if name != registry.DENSE])
def test_what_compresses_takes_all_options_that_are_listed_for_all(name):
    shared = [field.name for field in dataclasses.fields(Options) if field.metadata]
    assert {*shared} <= {field.name for field in registry.get(name).fields}


def test_topk_keeps_at_least_one():
    assert specs.parse("topk:0.0079,block=64").options.codec.keep == 1
    assert specs.parse("topk:0.0001,block=16384").options.codec.keep == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int5", r"--exchange='int5' is not known\. Did you mean 'int"),
        ("INT8", r"--exchange='INT8' is not known\. Did you mean 'int8'"),
        ("topk:0.1,share=0.2", "share is given twice, the first time without its name"),
        ("topk:share=2", r"topk:share=2: '2' is not a share of elements in \(0, 1\]"),
        ("powersgd:rank=4.0", "'4.0' is not a rank from 1 to 1024"),
        ("powersgd:rnk=4", r"option='rnk' is not known\. Did you mean 'rank'"),
        ("int4:blok=64", r"option='blok' is not known\. Did you mean 'block'"),
        ("int4:block=100", r"int4:block=100: .*block=100 is not one of 64, 128, 256, 512, 1024, 2048, 4096 elements"),
        ("int4:block=a", r"--exchange=int4:block=a: .* is not a whole number; allowed are 64, 128, .* 4096 elements"),
        ("topk:0.1,block=9", r"block=9 is not one of 64, .* 8192, 16384 elements"),
        ("bf16:rounding=stochastic", "rounding='stochastic' is an option of int8, int4, int2 only"),
        ("none:block=64", r"--exchange=none:block=64: none takes no options\. Write --exchange=none\."),
        ("int4:pattern=rink", r"pattern='rink' is not known"),
        ("int4:error_feedback=2", "error_feedback=2 is not true or false"),
        ("int4:pattern=ring,pipeline=true", "pipeline=true has no effect with pattern=ring, which works without one"),
        ("int4:overlap=no", "overlap='no' is not true or false"),
        ("int4:warmup_steps=-1", r"warmup_steps=-1 is not a whole number of at least 0"),
        ("topk:2", r"'2' is not a share of elements in \(0, 1\]"),
        ("topk:nan", r"'nan' is not a share"),
        (
            "topk:0.0001",
            r"share=0\.0001 is less than half an element of a block of 4096, .* Use share=0\.000244 or more",
        ),
        (
            "topk:0.001,block=64",
            r"block of 64, .* share=0\.015625 or more, or larger blocks \(block=16384 is the largest",
        ),
        ("topk:x", r"'x' is not a share"),
        ("int4:block", r"'block' is not key=value\. Write e\.g\. --exchange=int4:block=512,pattern=ring\."),
        ("topk:0.1,x", r"--exchange='topk:0\.1,x': 'x' is not .* Write e\.g\. --exchange=topk:0\.1,momentum=0\.9,"),
        ("powersgd:2,x", r"Write e\.g\. --exchange=powersgd:2,start_after=100\."),
        ("auto:x", r"Write e\.g\. --exchange=auto:max_error=0\.2\."),
    ],
)
def test_what_cannot_be_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        specs.parse(text)


@pytest.mark.parametrize("name", [name for name in registry.names() if name != "none"])
def test_what_errors_propose_can_be_written(name):
    with pytest.raises(ConfigError) as caught:
        specs.parse(f"{name}:=")
    proposed = str(caught.value).partition("Write e.g. --exchange=")[2].removesuffix(".")
    assert specs.parse(proposed).text == proposed
