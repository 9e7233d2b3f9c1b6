"""A GPU's name as drivers, other tools and people write it."""

import pytest

from tokentwin.serving.deployments.gpu_spec import find_gpu, gpus
from tokentwin.serving.errors import UserError


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
        ("AMD Instinct MI355X OAM", "MI355X"),
        ("NVIDIA A100-PCIE-80GB", "A100-80G-PCIe"),
        ("NVIDIA A100 80GB PCIe", "A100-80G-PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-40G-PCIe"),
        ("a100_sxm_80gb", "A100-80G"),
        ("Tesla V100-SXM2-16GB", "V100-16G"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA GH200 Superchip", "GH200"),
        ("NVIDIA H20", "H20"),
        ("Gaudi3", "Gaudi-3"),
        ("Intel Gaudi 3", "Gaudi-3"),
        ("tpu_v6e", "TPU-v6e"),
        ("Trillium", "TPU-v6e"),
        *((name, name) for name in gpus()),
    ],
)
def test_spellings(written: str, name: str) -> None:
    assert find_gpu(written).name == name


@pytest.mark.parametrize("written", ["A100", "H1000", "sxm", "80GB", "NVIDIA"])
def test_an_incomplete_name_is_refused(written: str) -> None:
    with pytest.raises(UserError, match="choose one of"):
        find_gpu(written)
