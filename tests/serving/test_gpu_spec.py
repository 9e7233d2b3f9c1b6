"""GpuSpec: the catalogue against its makers' figures, files of a user's own, and one-line errors."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from tokentwin.calibration.kernels.catalogue import load_kernels
from tokentwin.calibration.kernels.surfaces import bundled_names
from tokentwin.calibration.operations import Gemm
from tokentwin.calibration.steps.external_calibration import predicted_cost
from tokentwin.calibration.trust import TrustLevel
from tokentwin.commands.gpus import gpus as verb
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import GpuSpec, find_gpu, gpus
from tokentwin.serving.errors import UserError


def test_the_catalogue_has_what_the_makers_state() -> None:
    h100, b200, l40s = find_gpu("H100"), find_gpu("B200"), find_gpu("L40S")
    assert h100.bf16_flop_per_s / h100.memory_bytes_per_s == pytest.approx(295, abs=1)  # its well-known ridge point
    assert (h100.sm_count, h100.link_bytes_per_s) == (132, 450e9)
    assert b200.flop_per_s("mxfp4") == 2 * b200.flop_per_s("fp8") == 4 * b200.flop_per_s("bfloat16")
    assert l40s.link_bytes_per_s == l40s.pcie_bytes_per_s  # it has no NVLink
    labels = {"A100-40G": 40, "A100-80G": 80, "L40S": 48, "H100": 80, "H200": 141, "RTX-4090": 24, "RTX-PRO-6000": 96}
    for name, label in labels.items():
        assert 0.9 < find_gpu(name).memory_bytes / (label * 1024**3) < 1.0, name  # what CUDA reports is less


@pytest.mark.parametrize("name", gpus())
def test_every_gpu_is_plausible_and_its_price_is_dated(name: str) -> None:
    gpu = gpus()[name]
    assert gpu.bf16_flop_per_s <= (gpu.fp8_flop_per_s or gpu.bf16_flop_per_s) <= 2.1 * gpu.bf16_flop_per_s
    assert 1e-3 < gpu.memory_bytes_per_s / gpu.bf16_flop_per_s < 1e-1
    assert gpu.link_bytes_per_s >= gpu.pcie_bytes_per_s
    assert gpu.usd_per_hour > 0
    assert gpu.power_w is not None and 50 < gpu.power_w < 2000
    assert gpu.linked_gpus is not None and gpu.linked_gpus >= 1
    assert gpu.price_source
    assert gpu.source
    year, month, day = gpu.price_as_of.split("-")
    assert (len(year), len(month), len(day)) == (4, 2, 2)


@pytest.mark.parametrize("name", sorted(set(gpus()) - set(bundled_names())))
def test_a_gpu_without_measured_kernels_is_a_roofline_with_a_wide_interval(name: str) -> None:
    llama = Deployment(model="Llama-3.1-8B", device="cuda")
    estimate = load_kernels(find_gpu(name)).time(Gemm("gate and up", 64.0, 28_672, 4096, "bfloat16"))
    assert estimate.level == TrustLevel.EXTRAPOLATED
    assert estimate.sigma >= 0.25
    own, known = (predicted_cost(gpu, llama).known_interval.decode for gpu in (name, "H100"))
    assert own[1] / own[0] >= known[1] / known[0]


def test_a_type_without_a_unit_is_computed_in_16_bits() -> None:
    a100, h100 = find_gpu("A100-80G"), find_gpu("H100")
    for dtype in ("float16", "fp8", "fp8_block", "mxfp4"):
        assert a100.flop_per_s(dtype) == a100.bf16_flop_per_s
    assert h100.flop_per_s("fp8_block") == h100.fp8_flop_per_s
    assert h100.flop_per_s("mxfp4") == h100.flop_per_s("bfloat16") == h100.bf16_flop_per_s


def test_names_are_found_in_any_case_and_unknown_ones_are_told_what_there_is() -> None:
    assert find_gpu("h100") is find_gpu("H100")
    says = r"'H300': is not a known GPU .did you mean .*; choose one of .*H200.*or give a YAML file"
    with pytest.raises(UserError, match=says):
        find_gpu("H300")


def test_a_gpu_of_ones_own_is_a_catalogue_entry_in_a_file(tmp_path: Path) -> None:
    mine = find_gpu("H100").model_dump(exclude={"name"}) | {"usd_per_hour": 1.5, "price_as_of": "2026-11-01"}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"ours": mine}))
    gpu = find_gpu(str(path))
    assert (gpu.name, gpu.usd_per_hour) == ("ours", 1.5)
    assert gpu == GpuSpec(name="ours", **mine)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("a: [", "is not YAML"),
        ("- H100", "must map a GPU's name"),
        ("H100: 80", "must map a GPU's name"),
        ("{}", "describes 0 GPUs"),
        ("a: {memory_bytes: -1}", "a.memory_bytes: -1"),
        ("a: {tflops: 3}", "a.memory_bytes"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "gpu.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as caught:
        find_gpu(str(path))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_verb_lists_them_all() -> None:
    done = CliRunner().invoke(verb)
    assert done.exit_code == 0
    assert all(name in done.output for name in gpus())
