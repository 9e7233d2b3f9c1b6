"""LLMServingSim's kernel profiles: what is read, the value of a few shapes, and errors against whole tables."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab.kernels.fit import fit_profiles
from lab.kernels.llmservingsim import profiled
from tokentwin.calibration.kernels.catalogue import TransferredKernels, load_kernels
from tokentwin.calibration.kernels.surfaces import KernelSurfaces, is_whole
from tokentwin.calibration.operations import DecodeAttention, Experts, Gemm
from tokentwin.calibration.trust import TrustLevel
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.errors import UserError

PROFILES = Path(__file__).parents[3] / "shared" / "data" / "llmservingsim" / "kernel_profiles"
needs_profiles = pytest.mark.skipif(not PROFILES.is_dir(), reason="the profiles are not here: no ../shared/data")


def written(folder: Path) -> Path:
    place = folder / "RTX4090" / "meta-llama" / "Llama-3.1-8B" / "bf16" / "tp2"
    place.mkdir(parents=True)
    (place / "dense.csv").write_text("layer,tokens,time_us\nqkv_proj,64,33\nqkv_proj,1,30\nlayernorm,1,2\n")
    (place / "per_sequence.csv").write_text("layer,sequences,time_us\nlm_head,8,600.5\n")
    rows = ["16,0,0,0,9.5", "16,32,0,0,10", "0,0,4,64,14", "16,0,4,64,20"]
    (place / "attention.csv").write_text("prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n" + "\n".join(rows))
    return folder / "RTX4090"


def test_layers_are_shapes_of_one_device(tmp_path: Path) -> None:
    qkv, head, prompts, decodes = profiled(written(tmp_path))
    assert isinstance(qkv.operation, Gemm) and (qkv.operation.n, qkv.operation.k) == (3072, 4096)
    assert np.array_equal(qkv.operation.m, [1, 64]) and qkv.ns.tolist() == [30_000, 33_000]
    assert isinstance(head.operation, Gemm) and head.operation.n == 64128 and head.ns.tolist() == [600_500]
    assert prompts.ns.tolist() == [9500]  # neither over a past nor beside decodes
    assert isinstance(decodes.operation, DecodeAttention)
    assert (decodes.operation.kv_heads, float(decodes.operation.context[0])) == (4, 4 * 64)


def test_profiles_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"profiles.*has no <organisation>"):
        list(profiled(tmp_path))
    folder = written(tmp_path)
    (next(folder.rglob("attention.csv"))).write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"attention.csv.*has no column prefill_chunk"):
        list(profiled(folder))


def test_what_was_not_profiled_is_transferred() -> None:
    kernels = load_kernels(find_gpu("RTX-4090"))
    assert isinstance(kernels, KernelSurfaces) and not is_whole(kernels)
    transferred = TransferredKernels.to(kernels.gpu, kernels)
    assert all(is_whole(donor) and "experts/bfloat16" in donor.fits for donor in transferred.donors)
    experts = Experts("", 64.0, 2048, 768, 8, 128)
    assert kernels.time(experts).ns == transferred.time(experts).ns
    known, other = (kernels.time(Gemm("", 64.0, n, 4096)) for n in (6144, 1536))
    assert known.level == TrustLevel.VALIDATED and other.level == TrustLevel.EXTRAPOLATED
    assert other.sigma > known.sigma


@needs_profiles
def test_the_bundled_fit_is_that_of_the_profiles_and_beats_a_transfer() -> None:
    gpu = find_gpu("RTX-4090")
    fitted, about = fit_profiles(PROFILES / "RTX4090", gpu)
    assert about["licence"] == "MIT" and about["held_out"]["gemm/bfloat16"]["shapes_median"] < 0.03
    gemm = Gemm("", np.array([3.0, 300.0]), 14336, 4096)
    assert load_kernels(gpu).time(gemm).ns == pytest.approx(fitted.time(gemm).ns, rel=0.01)
    away = replace(gemm, k=5120)
    assert load_kernels(gpu).time(away).sigma[0] < TransferredKernels.to(gpu).time(away).sigma[0] + 0.05


def test_donors_count_by_their_datasheet_and_by_what_they_predict_right() -> None:
    gpu = find_gpu("H100-PCIe")
    near = TransferredKernels.to(gpu)
    hopper = [donor.fits.keys() == load_kernels(find_gpu("H100")).fits.keys() for donor in near.donors]
    assert near.weights.sum() == pytest.approx(1) and near.weights[hopper].sum() > near.weights[np.invert(hopper)].max()
    gemm = Gemm("", np.array([4.0, 4096.0]), 6144, 4096)
    fit = near.donors[0].fits["gemm/bfloat16"]
    few = replace(fit, surface=replace(fit.surface, shapes=fit.surface.shapes[:3], values=fit.surface.values[:3]))
    anchors = KernelSurfaces(gpu, {"gemm/bfloat16": few})
    anchored = TransferredKernels.to(gpu, anchors)
    assert anchored.weights[0] > near.weights[0]  # nothing predicts them as well as the GPU that they are of
    own = near.donors[0].time(gemm).ns
    assert np.all(np.abs(np.log(anchored.time(gemm).ns / own)) <= np.abs(np.log(near.time(gemm).ns / own)) + 1e-9)


@needs_profiles
def test_an_rtx_4090_without_tables_is_no_worse_than_from_its_likeliest_donor() -> None:
    """By the root mean square errors of its profiled kernels, added up."""
    gpu = find_gpu("RTX-4090")
    near = TransferredKernels.to(gpu)
    likeliest = replace(near, weights=np.eye(len(near.donors))[near.weights.argmax()])
    missed = [
        sum(
            float(np.sqrt(np.mean(np.square(np.log(kernels.time(m.operation).ns / m.ns)))))
            for m in profiled(PROFILES / "RTX4090")
        )
        for kernels in (near, likeliest)
    ]
    assert missed[0] < missed[1]


@needs_profiles
def test_another_projects_profiles_agree_with_nvidias_tables() -> None:
    """Of the RTX PRO 6000 there are both."""
    kernels = load_kernels(find_gpu("RTX-PRO-6000"))
    off: dict[str, list[np.ndarray]] = {}
    for m in profiled(PROFILES / "RTXPRO6000"):
        off.setdefault(m.key, []).append(np.abs(kernels.time(m.operation).ns / m.ns - 1))
    medians = {key: float(np.median(np.concatenate(parts))) for key, parts in off.items()}
    assert medians["gemm/bfloat16"] < 0.06 and medians["experts/bfloat16"] < 0.12
    assert medians["prefill/bfloat16"] < 0.1 and medians["decode/bfloat16"] < 0.12
