"""The Calibration page: its figures against the kernel models, and every error path through AppTest."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("streamlit")


from tests.calibration.test_calibration import measured
from tests.dashboard.pages import charts, opened
from tests.dashboard.samples import one_line
from tokentwin.calibration.kernels.catalogue import load_kernels
from tokentwin.calibration.kernels.shapes import estimate_at, measured_at, operation_at
from tokentwin.calibration.kernels.structure import structure_of
from tokentwin.calibration.kernels.surfaces import bundled_names
from tokentwin.calibration.operations import floor_ns
from tokentwin.calibration.steps.correction import Correction
from tokentwin.calibration.steps.external_calibration import ExternalCalibration
from tokentwin.calibration.steps.fit import fit, predict, step_residuals_table
from tokentwin.calibration.steps.measured_runs import MeasuredRuns, OwnFigure
from tokentwin.calibration.steps.operation_cost import HostTimes
from tokentwin.calibration.trust import TrustLevel
from tokentwin.dashboard.calibration_page import charts as calibration_charts
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu

H100 = load_kernels(find_gpu("H100"))


page = partial(opened, "calibration")


# Shapes


@pytest.mark.parametrize("key", sorted(H100.fits))
def test_an_operation_lies_where_it_was_made(key):
    surface = H100.fits[key].surface
    sizes = np.meshgrid(*(np.exp2(axis) for axis in surface.knots), indexing="ij")
    for at in surface.shapes[:: max(len(surface.shapes) // 20, 1)]:
        shape = np.exp2(at).tolist()
        operation = operation_at(key, shape, sizes)
        structure = structure_of(operation)
        assert structure.key(operation) == key
        assert structure.shape(operation) == pytest.approx(shape, rel=1e-3)
        unwindowed = len(shape) != 4 or shape[-1] >= 2**17
        if unwindowed:
            for got, meant in zip(structure.sizes(operation), sizes, strict=True):
                np.testing.assert_allclose(np.broadcast_to(got, meant.shape), meant)


@pytest.mark.parametrize("key", ["gemm/bfloat16", "prefill/bfloat16", "experts/mxfp4"])
def test_an_estimate_is_that_of_the_kernel_model(key):
    fit_ = H100.fits[key]
    shape = np.exp2(fit_.surface.shapes[7 % len(fit_.surface.shapes)]).tolist()
    sizes = tuple(np.exp2(axis[-4:]) for axis in fit_.surface.knots)
    estimate = estimate_at(H100.gpu, key, fit_, shape, sizes)
    for ours, theirs in zip(estimate, H100.time(operation_at(key, shape, sizes)), strict=True):
        np.testing.assert_allclose(ours, theirs)


def test_the_fit_is_near_what_was_measured_of_it():
    fit_ = H100.fits["gemm/bfloat16"]
    for number in range(0, len(fit_.surface.shapes), 60):
        (knots,), ns = measured_at(H100.gpu, "gemm/bfloat16", fit_, number)
        estimate = estimate_at(H100.gpu, "gemm/bfloat16", fit_, np.exp2(fit_.surface.shapes[number]).tolist(), (knots,))
        assert np.median(np.abs(np.log(estimate.ns / ns))) < 0.1
        assert (estimate.level == TrustLevel.VALIDATED).all()


# Figures


@pytest.mark.parametrize("key", ["gemm/fp8", "prefill/fp8", "decode/fp8", "experts/mxfp4"])
def test_every_kind_of_kernel_has_its_figures(key):
    fit_ = H100.fits[key]
    figure = calibration_charts.times(H100.gpu, key, fit_, 0, 1)
    traces = {trace.name: trace for trace in figure.data}
    assert set(traces) == {"90 % band", "roofline", "fit", "measured"}
    assert (np.array(traces["fit"].y) >= np.array(traces["roofline"].y) * 0.999).all()
    shape = np.exp2(fit_.surface.shapes[0]).tolist()
    shares = calibration_charts.utilisations({"H100": (H100.gpu, fit_)}, key, shape, 1)
    assert max(np.nanmax(trace.y) for trace in shares.data if np.isfinite(trace.y).any()) <= 100.1
    holes, known, dots = calibration_charts.domain(calibration_charts.known(H100.gpu, key, fit_, 0, 1)).data
    assert (np.isnan(holes.z) ^ np.isnan(known.z)).all()
    assert len(dots.x) == len(dots.y) > 0


def test_a_hole_is_where_the_model_extrapolates():
    fit_ = H100.fits["decode/bfloat16"]
    holes = calibration_charts.domain(calibration_charts.known(H100.gpu, "decode/bfloat16", fit_, 0, 0)).data[0]
    shape = np.exp2(fit_.surface.shapes[0]).tolist()
    for i, j in ((0, 0), (14, 14), (27, 27), (5, 23)):
        level = estimate_at(H100.gpu, "decode/bfloat16", fit_, shape, (holes.x[j], holes.y[i])).level
        assert np.isfinite(holes.z[i][j]) == (level == TrustLevel.EXTRAPOLATED)


def test_utilisation_is_the_roofline_over_the_time():
    fit_ = H100.fits["gemm/fp8"]
    shape = np.exp2(fit_.surface.shapes[-1]).tolist()
    line = calibration_charts.utilisations({"H100": (H100.gpu, fit_)}, "gemm/fp8", shape, 0).data[0]
    x, y = line.x[100], line.y[100]
    operation = operation_at("gemm/fp8", shape, (x,))
    assert y == pytest.approx(100 * floor_ns(H100.gpu, operation) / H100.time(operation).ns)


# The page


def test_it_opens_on_bundled_tables(tmp_path):
    app = page(tmp_path / "nowhere")
    assert not app.exception and not app.error
    assert [m.label for m in app.metric] == ["shapes p50", "shapes p90", "sizes p50", "sizes p90"]
    times, gpus, domain = charts(app)
    assert times["layout"]["yaxis"]["title"]["text"] == "time (µs)"
    assert {trace["name"] for trace in gpus["data"]} == {"H100", "A100-80G", "H200", "B200"}
    assert domain["layout"]["xaxis"]["title"]["text"] == "n (columns)"


def test_the_url_chooses_gpu_kernel_shape_and_size(tmp_path):
    app = page(tmp_path, gpu="L40S", kernel="decode/fp8", shape="8 × 8 × 128", size="64", beside="B200")
    assert not app.exception and not app.error and not app.info
    assert [box.value for box in app.selectbox] == ["L40S", "decode/fp8", "8 × 8 × 128", "64"]
    assert {trace["name"] for trace in charts(app)[1]["data"]} == {"L40S", "B200"}


@pytest.mark.parametrize("gpu", bundled_names())
def test_every_bundled_gpu_opens(tmp_path, gpu):
    assert not page(tmp_path, gpu=gpu, kernel="prefill/bfloat16").exception


def test_nonsense_in_the_url_is_said(tmp_path):
    app = page(tmp_path, gpu="../..", kernel="gemm/int3", shape="1", size="x", beside="C3PO")
    assert not app.exception and not app.error and len(app.info) == 4


@pytest.fixture
def calibrated(calibrations, tmp_path):
    return shutil.copytree(calibrations, tmp_path / "runs")


@pytest.fixture(scope="module")
def calibrations(tmp_path_factory):
    """A calibration of our own engine, as `tokentwin calibrate` leaves it, and one of another."""
    tmp_path = tmp_path_factory.mktemp("calibrations")
    steps = measured(0.05)
    own = fit(steps, deployment="{}", hardware={"cpu": "two cores"}, version="", created="2026", noise={})
    own.save(tmp_path / "own")
    pq.write_table(step_residuals_table(steps, predict(own, steps)), tmp_path / "own" / "steps.parquet")
    errors = {"decode": {"steps": 9, "median_pct": 1.0, "p95_pct": 3.0, "bias_pct": 0.1}}
    ExternalCalibration(
        "H100", Deployment().model_dump_json(), Correction(), HostTimes(), (0.9, 1.2), "a log", "2026", errors
    ).save(tmp_path / "other")
    figure = OwnFigure("at night", "tpot_ms.mean", measured=10.0, blind=12.0, low=9.0, high=13.0, others=11.0)
    MeasuredRuns("H100", "{}", (), (figure,), "1 measured run", "2026").save(tmp_path / "runs of a server")
    return tmp_path


def test_our_engine_predicted_and_measured(calibrated):
    app = page(calibrated, of="Engines", calibration="own")
    assert not app.exception and not app.error
    assert {m.label.partition(",")[0] for m in app.metric} == {"prefill", "decode", "mixed"}
    (residuals,) = charts(app)
    assert "a step" in {trace["name"] for trace in residuals["data"]}
    assert "launch" in set(app.dataframe[0].value["of"])
    assert "Launches without CUDA graphs: not measured" in " ".join(caption.value for caption in app.caption)


def test_measured_runs_beside_their_predictions(calibrated):
    app = page(calibrated, of="Engines", calibration="runs of a server")
    assert not app.exception and not app.error
    (row,) = app.dataframe[0].value.to_dict("records")
    assert row["run"] == "at night" and [row[name] for name in row if name.endswith("runs")] == pytest.approx([20, 10])


def test_another_engine_by_its_correction(calibrated):
    app = page(calibrated, of="Engines", calibration="other")
    assert not app.exception and not app.error
    assert "from a log" in app.caption[0].value
    assert app.dataframe[1].value["median_pct"].tolist() == [1.0]


def test_without_a_calibration_it_says_how_to_make_one(tmp_path):
    app = page(tmp_path, of="Engines")
    assert not app.exception and "no calibration" in app.info[0].value and "tokentwin calibrate" in app.code[0].value


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("own", "calibration.json", b"{"),
        ("own", "calibration.json", b'{"format": 1}'),
        ("own", "steps.parquet", b"PAR1 but not really"),
        ("other", "engine.json", b"[]"),
    ],
)
def test_a_damaged_calibration_is_one_line(calibrated, name, file, content):
    (calibrated / name / file).write_bytes(content)
    assert "calibration" in one_line(page(calibrated, of="Engines", calibration=name))


def test_steps_of_another_table_are_one_line(calibrated):
    pq.write_table(pa.table({"regime": ["decode"]}), Path(calibrated) / "own" / "steps.parquet")
    assert one_line(page(calibrated, of="Engines", calibration="own"))
