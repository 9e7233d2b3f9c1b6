"""What is wrong with a setting is said in one line that names it and the remedy, in the same words everywhere."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from tokentwin.cli import cli
from tokentwin.planning.deployments import named_value
from tokentwin.planning.sweep.settings import SweepSettings
from tokentwin.serving.data_file import parse_yaml
from tokentwin.serving.deployments.config import Deployment, load_deployment, parse
from tokentwin.serving.errors import UserError
from tokentwin.traces.synth import SynthSpec


@pytest.mark.parametrize(
    ("model", "data", "line"),
    [
        (Deployment, {"polcy": "vllm"}, "x.polcy: 'vllm': is not a setting; did you mean policy?"),
        (
            Deployment,
            {"scheduler": {"max_num_seq": 9}},
            "x.scheduler.max_num_seq: 9: is not a setting; did you mean max_num_seqs?",
        ),
        (
            Deployment,
            {"fleet": {"pools": [{"replica": 2}]}},
            "x.fleet.pools.0.replica: 2: is not a setting; did you mean replicas?",
        ),
        (Deployment, {"zzz": 1}, "x.zzz: 1: is not a setting; leave it out"),
        (SynthSpec, {"prompt": 1, "output": 1, "requests": 1}, "x.arrivals: is missing; add it"),
        (
            SynthSpec,
            {"arrivals": {"kind": "poisson", "rat": 3, "rate": 3}, "prompt": 1, "output": 1, "requests": 1},
            "x.arrivals.poisson.rat: 3: is not a setting; did you mean rate?",
        ),
        (Deployment, {"scheduler": {"max_num_seqs": True}}, "x.scheduler.max_num_seqs: 'true': must be a number"),
        (
            Deployment,
            {"scheduler": {"edf_ttft_ms": {"a": True}}},
            "x.scheduler.edf_ttft_ms.a: 'true': must be a number",
        ),
        (SweepSettings, {"base": {}, "seeds": [3, False]}, "x.seeds.1: 'false': must be a number"),
        (SweepSettings, {"base": {}, "gird": {}}, "x.gird: is not a setting; did you mean grid?"),
    ],
)
def test_a_near_miss_and_a_gap_are_named(model: type[BaseModel], data: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(model, data, "x")
    assert str(caught.value) == line


def test_a_path_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    with pytest.raises(UserError) as caught:
        load_deployment(path)
    assert str(caught.value).endswith("cannot be read: No such file or directory")


BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghijkl"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BOMB, "line 1: its aliases expand to more than 1,000,000 characters"),
        (BOMB.replace("[", "{<<: [").replace("]", "]}").replace("{<<: [x, x]}", "{x: 1}"), "its aliases"),
        ("&a [*a]", "its aliases"),
        ("a: 1\nb: {c: 1, d: 2, c: 3}", "line 2: c is set twice"),
        ("a: 010", "line 1: 010 is not a decimal number"),
        ("a: 1:30", "line 1: 1:30 is not a decimal number"),
        ('a: "\\ud800"', "line 1: an escape is not a valid character"),
    ],
)
def test_what_yaml_allows_and_nobody_means_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_yaml(text)
    with pytest.raises(UserError, match=r"^vary x: .* cannot be read: line "):
        named_value("vary", f"x={text}")


def test_what_yaml_is_used_for_is_read() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: [*a, *a]\nd: ['010', '1:30', 0, -0.5, 1.0e+3]"
    a = {"x": 1, "y": 2}
    assert parse_yaml(text) == {"a": a, "b": {"x": 3, "y": 2}, "c": [a, a], "d": ["010", "1:30", 0, -0.5, 1000.0]}


@pytest.mark.parametrize("content", ["a: [", "seed: 2020-99-99", "seed: !!bool x", "[" * 600, "!!python/name:os.x"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", "never", "--gpu", "H100", "-o", "never", "-d"),
        ("simulate", "never", "-o", "never", "--gpu"),
        ("sweep", "-o", "never"),
        ("trace", "synth", "never.parquet", "--spec"),
        ("compare", "--gpu", "H100", "--b", "policy=fair", "--trace"),
        ("plan", "--slo", "ttft_ms p99<=500", "--gpu", "H100"),
    ],
)
def test_a_file_that_is_not_yaml_is_one_line(tmp_path: Path, arguments: tuple[str, ...], content: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match="is not YAML"):
        cli.main([*arguments, str(path)], standalone_mode=False)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ("--attention", "foo"),
            "attention: 'foo': must be auto, torch, unfused, triton, hybrid, varlen, flash-attn, flashinfer, or your "
            "own path/to/file.py:Class or package.module:Class",
        ),
        (("--attention", "triton"), "attention: 'triton': works only on the real engine; leave it out with --gpu"),
        (("--device", "cpu"), "device: 'cpu': works only on the real engine; leave it out with --gpu"),
        (("--threads", "4"), "threads: 4: works only on the real engine; leave it out with --gpu"),
    ],
)
def test_a_gpu_that_is_simulated_refuses_what_only_the_real_engine_heeds(flags: tuple[str, ...], line: str) -> None:
    data = Path(__file__).parent / "none.parquet"
    with pytest.raises(UserError) as caught:
        arguments = ["simulate", str(data), "--gpu", "H100", "-o", "never", *flags]
        cli.main(arguments, standalone_mode=False)
    assert str(caught.value) == line


def test_help_says_what_a_setting_is() -> None:
    text = " ".join(CliRunner().invoke(cli, ["simulate", "--help"]).output.split())
    assert "Maximum number of running requests [a deployment's default: 128]" in text
    assert "Override" not in text
