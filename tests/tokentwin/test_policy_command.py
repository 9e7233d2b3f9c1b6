"""A policy that breaks its contract ends every verb in one line that names it, the step and the rule."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from tests.command import tokentwin
from tests.serving.test_contract import FAILING
from tokentwin.cli import cli
from tokentwin.serving.errors import UserError

ORACLE = Path(__file__).parents[1] / "data" / "oracle"
RECORDING = next(iter(sorted(ORACLE.glob("*.gz"))))


def run(*arguments: object) -> None:
    CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False, standalone_mode=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("own")
    (made / "own.py").write_text(FAILING.read_text())
    for name, prompt, output in (("long", 900, 30), ("short", 40, 10)):
        run("trace", "synth", made / f"{name}.jsonl", "--requests", 20, "--arrivals", "poisson:rate=200",
            "--prompt", prompt, "--output", output)  # fmt: skip
    scheduler = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 200, "num_blocks": 60}
    engine = {"model": "random:llama", "device": "cpu", "dtype": "float32", "scheduler": scheduler}
    (made / "engine.yaml").write_text(yaml.safe_dump(engine))
    return made


VERBS: dict[str, tuple[Any, ...]] = {
    "simulate": ("simulate", "long.jsonl", "--gpu", "H100", "--no-band", "--out", "run", "--policy"),
    "compare": ("compare", "--trace", "long.jsonl", "--gpu", "H100", "--b"),
}


@pytest.mark.parametrize("name", ["ManyTokens", "Exits", "NanScore", "PlansNothing"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_ends_in_one_line(verb: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=rf"policy: .*own.py:{name}': step \d+") as caught:
        run(*VERBS[verb], f"policy=own.py:{name}" if verb == "compare" else f"own.py:{name}")
    assert "\n" not in str(caught.value)
    assert not (folder / "run").exists()


@pytest.mark.parametrize("name", ["ManyTokens", "Exits", "NanScore", "PlansNothing"])
def test_conformance_says_so_in_one_line(name: str, folder: Path) -> None:
    done = tokentwin("conformance", RECORDING, "--policy", "own.py:" + name, cwd=folder)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert re.match(rf"tokentwin: policy: .*own.py:{name}': step \d+", done.stderr)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["ManyTokens", "Exits", "NanScore", "PlansNothing"])
def test_so_does_the_engine(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the engine extra is not installed")
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=rf"policy: .*own.py:{name}': step \d+"):
        bench = ("bench", "short.jsonl", "--virtual-arrivals", "--deployment", "engine.yaml", "--out", "run")
        run(*bench, "--policy", f"own.py:{name}")
    assert not (folder / "run").exists()


RAISES = """
from tokentwin.serving.policies.ranked import RankedScheduler

class Raises(RankedScheduler):
    def score(self, request):
        return 1 / len(request.arrived.tenant)
"""


@pytest.mark.parametrize("verb", ["simulate", "plan"])
def test_authors_can_have_their_own_traceback(verb: str, folder: Path) -> None:
    """Also of what happened in a worker's process."""
    (folder / "raises.py").write_text(RAISES)
    ask = (verb, "short.jsonl", "--gpu", "H100", "--model", "Llama-3.1-8B", "--policy", "raises.py:Raises")
    ask += ("--slo", "ttft_ms p99<=1000") if verb == "plan" else ("--out", "run")
    short, whole = (tokentwin(*ask, *more, cwd=folder) for more in ((), ("--traceback",)))
    assert "Traceback" not in short.stderr
    assert whole.returncode == short.returncode == 2
    assert 'raises.py", line 6, in score\n    return 1 / len(request.arrived.tenant)' in whole.stderr
    assert "ZeroDivisionError" in whole.stderr and "call_limit" not in whole.stderr
    assert whole.stderr.endswith(short.stderr.splitlines()[-1] + "\n")
    for wrong in (("no-such.jsonl",), ("short.jsonl", "--policy", "no_such.py:Policy")):
        assert "Traceback" not in tokentwin("simulate", *wrong, "--out", "run", "--traceback", cwd=folder).stderr
