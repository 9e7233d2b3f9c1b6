"""A GPU of one's own, by the file that docs/models-and-gpus.md shows, through every command that names a GPU."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tokentwin.calibration.steps.external_calibration import identity, predicted_cost
from tokentwin.cli import cli
from tokentwin.serving.deployments.config import Deployment
from tokentwin.traces.recording import Recording, notes_of

PAGE = Path(__file__).parents[2] / "docs" / "models-and-gpus.md"
LLAMA = Deployment(model="Llama-3.1-8B", device="cuda")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("own-gpu")
    (documented,) = re.findall(r"```yaml\n(our-h100:.*?)```", PAGE.read_text(), re.S)
    (made / "our.yaml").write_text(documented)
    (made / "traffic.yaml").write_text(
        "{requests: 60, seed: 1, arrivals: {kind: poisson, rate: 30}, prompt: {kind: fixed, tokens: 300},"
        " output: {kind: fixed, tokens: 20}}"
    )
    return made


def run(folder: Path, *arguments: object) -> Result:
    words = [str(word) for word in (*arguments, "--gpu", folder / "our.yaml")]
    return CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False)


def test_explain_says_that_its_times_are_extrapolated(folder: Path) -> None:
    assert json.loads(run(folder, "explain", "--format", "json").output)["level"] == "extrapolated"


def test_a_run_is_simulated_and_diagnosed(folder: Path) -> None:
    out = folder / "run"
    run(folder, "simulate", folder / "traffic.yaml", "-o", out)
    trust = notes_of(Recording.load(out).run)["trust"]
    assert trust["level"] == "extrapolated" and "the catalogue lacks our-h100" in trust["reason"]
    told = json.loads(run(folder, "diagnose", out, "--format", "json").stdout)
    assert told["trust"]["level"] == "extrapolated" and told["verdict"]


def test_a_plan_has_it_beside_catalogued_gpus(folder: Path) -> None:
    words = ["plan", folder / "traffic.yaml", "--gpu", "H100", "--slo", "ttft_ms p99<=500", "--jobs", 1]
    told = run(folder, *words).stdout
    assert told.startswith(f"1 replica x TP1 {folder / 'our.yaml'} = 1 GPU, $1.80/h.")
    assert "step times: extrapolated" in told and "the catalogue lacks our-h100" in told and "\nvllm serve" in told


def test_compare_simulates_it(folder: Path) -> None:
    done = run(folder, "compare", "--trace", folder / "traffic.yaml", "--a", "policy=vllm", "--b", "policy=sjf")
    assert done.exit_code in (0, 3) and "TTFT" in done.stdout


def test_its_band_is_wider_than_that_of_the_gpu_that_it_resembles(folder: Path) -> None:
    """The wider still, if its file does not say of which generation it is."""
    (folder / "alone.yaml").write_text((folder / "our.yaml").read_text().replace("  generation: Hopper", "  #"))
    widths = []
    for gpu in ("H100", folder / "our.yaml", folder / "alone.yaml"):
        cost = predicted_cost(str(gpu), LLAMA)
        widths.append([high / low for low, high in cost.known_interval])
        assert ("catalogue lacks our-h100" in cost.untaught) == (gpu != "H100")
    assert all(a < b < c for a, b, c in zip(*widths, strict=True))


def test_another_datasheet_has_another_identity(folder: Path) -> None:
    (folder / "slower.yaml").write_text((folder / "our.yaml").read_text().replace("3.35e+12", "3.0e+12"))
    assert identity(str(folder / "slower.yaml")) != identity(str(folder / "our.yaml")) != identity("H100")
