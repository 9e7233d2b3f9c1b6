"""A GPU's name as drivers, other tools and people write it."""

import pytest

from serving.deployments.gpu_spec import find_gpu, gpus
from serving.errors import UserError


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100_sxm", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100-80G"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("gb300", "GB300"),
        ("gb200_nvl72", "GB200"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("AMD Instinct MI300X", "MI300X"),
        *((name, name) for name in gpus()),
    ],
)
def test_spellings(written: str, name: str) -> None:
    assert find_gpu(written).name == name


@pytest.mark.parametrize("written", ["A100", "H1000", "sxm", "80GB", "NVIDIA"])
def test_an_incomplete_name_is_refused(written: str) -> None:
    with pytest.raises(UserError, match="choose one of"):
        find_gpu(written)
