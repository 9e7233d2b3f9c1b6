"""Collectives: growth with bytes and devices, limits of links, fusion, and errors against the tables."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.kernels.aiconfigurator import Measured, measurements
from lab.kernels.collective_fit import fit_form
from tokentwin.calibration.kernels.collectives import COLLECTIVES, ClosedForm, Line, collectives_of
from tokentwin.calibration.operations import Collective, Elementwise, StepSizes, floor_ns
from tokentwin.calibration.step_operations import step_operations
from tokentwin.calibration.steps.external_calibration import kernels
from tokentwin.calibration.trust import TrustLevel
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu, gpus
from tokentwin.serving.deployments.model_catalogue import find_model

TABLES = Path(__file__).parents[3] / "shared" / "data" / "aiconfigurator" / "kernel_tables"
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")


@given(
    gpu=st.sampled_from(sorted(gpus())),
    kind=st.sampled_from(KINDS),
    devices=st.tuples(st.integers(2, 16), st.integers(2, 16)),
    elements=st.tuples(st.integers(1, 2**31), st.integers(1, 2**31)),
    fusible=st.booleans(),
)
def test_never_cheaper_with_more_bytes_or_more_devices(gpu, kind, devices, elements, fusible):
    (few, many), (small, large) = sorted(devices), sorted(elements)
    times = [
        float(kernels(gpu).time(Collective("c", kind, *sizes, fusible=fusible)).ns)
        for sizes in ((few, small), (few, large), (many, small), (many, large))
    ]
    less, bytes_more, devices_more, both = (ns * (1 + 1e-9) for ns in times)
    assert less <= bytes_more + 1e-3 and less <= devices_more + 1e-3
    assert bytes_more <= both + 1e-3 and devices_more <= both + 1e-3


@given(gpu=st.sampled_from(sorted(gpus())), devices=st.sampled_from([2, 4, 8]))
def test_the_time_grows_smoothly_but_where_an_engine_takes_another_kernel(gpu: str, devices: int) -> None:
    sizes = np.geomspace(256, 2**28, 2000)
    ns = kernels(gpu).time(Collective("c", "all_reduce", devices, sizes, fusible=True)).ns
    jumps = np.diff(np.log(ns)) > 2 * np.diff(np.log(sizes))  # no algorithm grows faster than its bytes
    assert jumps.sum() <= 2


def test_without_peer_access_pcie_is_dearer() -> None:
    staged = find_gpu("RTX-PRO-6000")
    peers = collectives_of(staged.model_copy(update={"peer_access": True}))
    message = Collective("c", "all_reduce", 2, np.array([4096.0 * rows for rows in (1, 32, 128, 2048)]))
    ratio = collectives_of(staged).time(message).ns / peers.time(message).ns
    assert np.all((ratio > 1.7) & (ratio < 4.0))
    assert np.all(collectives_of(staged).time(message).level == TrustLevel.EXTRAPOLATED)


def test_boards_differ_among_more_than_two_devices_over_pcie() -> None:
    """The board that was measured with eight L40S reached 1.5 GB/s. Another board need not, and the error says so."""
    message = Collective("c", "all_reduce", 8, np.array([2.0**25]))
    time = collectives_of(find_gpu("L40S")).time(message)
    gb_per_s = message.bytes / time.ns
    assert 3 < gb_per_s[0] < 8 and 0.6 < time.sigma[0] < 1.5
    pair = collectives_of(find_gpu("L40S")).time(replace(message, gpus=2))
    assert pair.sigma[0] < 0.2, "two devices do not share links"


def test_a_norm_behind_a_fused_all_reduce_needs_no_launch() -> None:
    after = Collective("all-reduce", "all_reduce", 8, np.array([5120.0 * 8, 5120.0 * 8192]), fusible=True)
    for name, saved in (("B300", True), ("H100", False)):
        time = kernels(name).time
        norm = Elementwise("norms", 8.0 * np.asarray(after.elements), after=after)
        apart, fused = time(replace(norm, after=None)).ns, time(norm).ns
        assert (fused < apart).tolist() == [saved, False]  # 84 MB are too many for the fused kernel
        assert np.all(fused >= floor_ns(find_gpu(name), norm))


def test_all_reduces_are_fused_for_tensor_parallelism_alone() -> None:
    model = find_model("Qwen3-30B-A3B")
    for ranks, fused in ((1, True), (2, False)):
        deployment = Deployment(model="Qwen3-30B-A3B", tensor_parallel_size=2, data_parallel_size=ranks)
        operations = step_operations(model, deployment, StepSizes(decode_rows=8, decode_context=800, sampled_rows=8))
        (norms,) = (op for op in operations if op.name == "norms")
        (reduce,) = (op for op in operations if op.name == "all-reduce")
        assert isinstance(norms, Elementwise) and isinstance(reduce, Collective)
        assert norms.after == reduce and reduce.fusible is fused
        assert bool(collectives_of(find_gpu("B200")).fuses(reduce)) is fused


def test_a_form_is_found_again() -> None:
    """Two rings that cross at 1 MiB, in noise of 2 %."""
    true = ClosedForm((Line(6e3, 1.5e3, 0.3, 0.2), Line(25e3, 0.5e3, 0.75, 0.1)), 0.0)
    rng = np.random.default_rng(3)
    h100 = find_gpu("H100")
    table = []
    for devices in (2, 4, 8):
        operation = Collective("", "all_gather", devices, 2.0 ** np.arange(8, 28))
        noise = np.exp(rng.normal(0, 0.02, 20))
        table.append(Measured("nccl/all_gather", operation, true.ns(operation, h100.link_bytes_per_s) * noise))
    form, errors = fit_form(h100, table)
    assert errors["median"] < 0.02 and form.most_gpus == 8
    between = Collective("", "all_gather", 6, np.geomspace(300, 2**27, 50))
    link = h100.link_bytes_per_s
    assert np.abs(np.log(form.ns(between, link) / true.ns(between, link))).max() < 0.06


@pytest.mark.skipif(not TABLES.is_dir(), reason="the kernel tables are not here: no ../shared/data")
@pytest.mark.parametrize("name", ["H100", "H200"])
def test_bundled_forms_are_as_near_the_tables_as_they_say(name: str) -> None:
    said = json.loads(COLLECTIVES.read_text())[name]["forms"]
    gpu, missed = find_gpu(name), []
    for m in measurements(str(TABLES / f"{name.lower()}_sxm"), name, "comm/"):
        if m.key == "nccl/all_reduce":
            form = ClosedForm([Line(**line) for line in said[m.key]["lines"]], 0.0)
            missed.append(form.ns(m.operation, gpu.link_bytes_per_s) / m.ns - 1)
    errors = np.abs(np.concatenate(missed))
    assert np.median(errors) == pytest.approx(said["nccl/all_reduce"]["off_by"]["median"], abs=0.01)
    assert np.quantile(errors, 0.9) == pytest.approx(said["nccl/all_reduce"]["off_by"]["p90"], abs=0.01)
