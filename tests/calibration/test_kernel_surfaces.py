"""Kernel surfaces: physical limits, recovered parameters, refused files, and held-out errors."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.kernels import aiconfigurator, fit
from lab.kernels.aiconfigurator import Measured, measurements
from lab.kernels.fit import fit_kernels, main
from lab.kernels.surface_fit import fit_efficiency, fit_kernel
from tokentwin.calibration.kernels.catalogue import TransferredKernels, load_kernels
from tokentwin.calibration.kernels.shapes import operation_at
from tokentwin.calibration.kernels.structure import Efficiency, structure_of
from tokentwin.calibration.kernels.surfaces import (
    KernelSurfaces,
    about_surfaces,
    bundled,
    bundled_names,
    read_surfaces,
    write_surfaces,
)
from tokentwin.calibration.latent_attention import HeadGemm, LatentDecode, LatentPrefill
from tokentwin.calibration.operations import (
    Collective,
    DecodeAttention,
    Elementwise,
    Experts,
    Gemm,
    KernelTimes,
    Operation,
    PrefillAttention,
    floor_ns,
)
from tokentwin.calibration.steps.correction import never_slower
from tokentwin.calibration.steps.external_calibration import identity, predicted_cost
from tokentwin.calibration.trust import TrustLevel
from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu, gpus
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import StepPlan

TABLES = Path(__file__).parents[3] / "shared" / "data" / "aiconfigurator" / "kernel_tables"
needs_tables = pytest.mark.skipif(not TABLES.is_dir(), reason="the kernel tables are not here: no ../shared/data")

H100 = find_gpu("H100")
KERNELS: dict[str, KernelTimes] = {name: load_kernels(find_gpu(name)) for name in ("H100", "A100-80G", "L4")}


def prompts(rows: float, length: float, past: float = 0.0, kv_dtype: str = "bfloat16") -> PrefillAttention:
    n = rows * length
    return PrefillAttention("a", rows, n, rows * past, n * past + n * (length + 1) / 2, 32, 8, 128, kv_dtype)


def decodes(rows: float, context: float, kv_dtype: str = "bfloat16") -> DecodeAttention:
    return DecodeAttention("a", rows, rows * context, 32, 8, 128, kv_dtype)


tokens = st.integers(1, 60_000)
operations = st.one_of(
    st.builds(
        Gemm,
        st.just("g"),
        tokens,
        st.integers(16, 200_000),
        st.integers(16, 100_000),
        st.sampled_from(["bfloat16", "float16", "fp8", "fp8_block", "mxfp4"]),
    ),
    st.builds(
        prompts,
        st.integers(1, 300),
        st.integers(1, 30_000),
        st.integers(0, 50_000),
        st.sampled_from(["bfloat16", "fp8"]),
    ),
    st.builds(decodes, st.integers(1, 3000), st.integers(1, 200_000), st.sampled_from(["bfloat16", "fp8"])),
    st.builds(
        Experts,
        st.just("e"),
        tokens,
        st.just(4096),
        st.integers(256, 16_384),
        st.integers(1, 8),
        st.sampled_from([8, 64, 256]),
        st.sampled_from([1, 4]),
        st.sampled_from([1, 8]),
        st.sampled_from(["bfloat16", "fp8", "fp8_block", "mxfp4"]),
    ),
    st.builds(Elementwise, st.just("n"), st.integers(1, 2**34)),
    st.builds(
        Collective,
        st.just("c"),
        st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
        st.sampled_from([2, 3, 4, 8, 16]),
        st.integers(1, 2**31),
    ),
)


@pytest.mark.parametrize("gpu", KERNELS)
@given(operation=operations)
def test_nothing_is_faster_than_its_roofline(gpu: str, operation: Operation) -> None:
    kernels = KERNELS[gpu]
    time = kernels.time(operation)
    assert np.isfinite(time.ns)
    assert time.ns >= floor_ns(kernels.gpu, operation) * (1 - 1e-9)
    assert 0 < time.sigma < 2


@given(
    n=st.sampled_from([1536, 4096, 6144, 14336, 28672, 44032]),
    k=st.sampled_from([2048, 4096, 5120, 8192, 22016]),
    dtype=st.sampled_from(["bfloat16", "fp8"]),
)
def test_more_tokens_take_longer_within_noise(n: int, k: int, dtype: str) -> None:
    """Measured kernels themselves get up to a fifth faster at some next larger size."""
    ns = KERNELS["H100"].time(Gemm("g", np.arange(2.0, 9000.0), n, k, dtype)).ns
    assert np.all(ns >= 0.8 * np.maximum.accumulate(ns))
    octaves = KERNELS["H100"].time(Gemm("g", np.array([1.0, 64, 512, 2048, 8192, 32768]), n, k, dtype)).ns
    assert np.all(np.diff(octaves[1:]) > 0)


@given(rows=st.integers(1, 512))
def test_more_context_takes_longer_within_noise(rows: int) -> None:
    ns = KERNELS["H100"].time(decodes(np.full(400, float(rows)), np.geomspace(2, 60_000, 400))).ns
    assert np.all(ns >= 0.93 * np.maximum.accumulate(ns))


def test_more_kv_heads_than_any_table_has_take_as_long_as_more_rows() -> None:
    """Tables end at 8 KV heads; a model of 2023 has 32, so 64 of its rows take as long as 256 rows of 8 heads."""
    many, few = (
        KERNELS["H100"].time(DecodeAttention("d", rows, rows * 512.0, n, n, 128))
        for n, rows in ((32, 64.0), (8, 256.0))
    )
    assert many.ns == few.ns and many.sigma > few.sigma
    assert (many.level, few.level) == (TrustLevel.INTERPOLATED, TrustLevel.VALIDATED)


@needs_tables
def test_heads_are_like_rows_in_the_tables() -> None:
    """Twice the rows with half of 8 KV heads take as long, by measured times of H100 and H200."""
    for system in ("h100_sxm", "h200_sxm"):
        ns: dict[tuple[float, ...], float] = {}
        for m in measurements(str(TABLES / system), system[:4].upper(), "attention"):
            at = m.operation
            if isinstance(at, DecodeAttention) and m.key == "decode/bfloat16" and at.head_dim == 128 and not at.window:
                group = at.heads / at.kv_heads
                ns |= {
                    (group, at.kv_heads, rows, context / rows): one
                    for rows, context, one in zip(at.rows, at.context, m.ns, strict=True)
                }
        ratios = [
            one / ns[group, 4, 2 * rows, context]
            for (group, heads, rows, context), one in ns.items()
            if heads == 8 and (group, 4, 2 * rows, context) in ns
        ]
        assert len(ratios) > 300
        assert np.median(ratios) == pytest.approx(1, abs=0.02)
        assert np.std(np.log(ratios)) < 0.1


def test_a_long_past_costs_what_its_pairs_cost() -> None:
    """With enough blocks to fill the device, a chunk over a past goes at the rate of long prompts."""
    alone, behind = prompts(8, 2048), prompts(8, 2048, 6144)
    rate = [operation.flops / KERNELS["H100"].time(operation).ns for operation in (prompts(2, 16384), behind)]
    assert rate[1] == pytest.approx(rate[0], rel=0.2)
    assert KERNELS["H100"].time(behind).ns > 4 * KERNELS["H100"].time(alone).ns


def test_ragged_prompts_lie_between_equal_ones_and_one_long_one() -> None:
    ragged = PrefillAttention("a", 4, 4096, 0, 3072 * 3073 / 2 + 1024 * 342 / 2, 32, 8, 128)
    equal, single = prompts(4, 1024), prompts(1, 4096)
    time = KERNELS["H100"].time
    assert time(equal).ns < time(ragged).ns < time(single).ns


def test_arrays_are_priced_as_their_elements_are() -> None:
    m = np.array([1.0, 7.0, 300.0, 5000.0])
    kernels = KERNELS["H100"]
    at_once = kernels.time(Gemm("g", m, 6144, 4096))
    for i, rows in enumerate(m):
        alone = kernels.time(Gemm("g", float(rows), 6144, 4096))
        assert (alone.ns, alone.sigma, alone.level) == pytest.approx(
            (at_once.ns[i], at_once.sigma[i], at_once.level[i])
        )


def test_steps_without_an_operation_are_priced_without_fuss() -> None:
    """In a table of steps some have no prompts, no decode rows or no tokens."""
    some = np.array([0.0, 3.0])
    for operation in (
        PrefillAttention("a", some, 10 * some, 0 * some, 55 * some, 32, 8, 128),
        DecodeAttention("a", some, 100 * some, 32, 8, 128),
        Gemm("g", some, 4096, 4096),
        Experts("e", some, 4096, 1536, 8, 128),
        Collective("c", "all_reduce", 2, 4096 * some),
    ):
        with np.errstate(all="raise"):
            for kernels in KERNELS.values():
                assert np.all(np.isfinite(kernels.time(operation).ns))


@pytest.mark.parametrize(
    ("operation", "level"),
    [
        (Gemm("g", 64, 4096, 4096), TrustLevel.VALIDATED),
        (Gemm("g", 70, 4096, 4096), TrustLevel.INTERPOLATED),
        (Gemm("g", 64, 28672, 4096), TrustLevel.INTERPOLATED),
        (Gemm("g", 64, 44032, 8192), TrustLevel.INTERPOLATED),
        (Gemm("g", 70, 128_256, 4096), TrustLevel.INTERPOLATED),
        (Gemm("g", 64, 4096, 300_000), TrustLevel.EXTRAPOLATED),
        (Gemm("g", 200_000, 4096, 4096), TrustLevel.EXTRAPOLATED),
        (prompts(1, 2048), TrustLevel.VALIDATED),
        (prompts(1, 2048, 4000), TrustLevel.INTERPOLATED),
        (prompts(1, 2048, 100_000), TrustLevel.EXTRAPOLATED),
        (decodes(64, 1000), TrustLevel.INTERPOLATED),
        (Collective("c", "all_reduce", 4, 2**21), TrustLevel.INTERPOLATED),
        (Collective("c", "all_reduce", 16, 2**20), TrustLevel.EXTRAPOLATED),
    ],
)
def test_levels_say_what_was_measured(operation: Operation, level: TrustLevel) -> None:
    assert KERNELS["H100"].time(operation).level == level


def test_far_from_the_tables_sigma_widens_and_the_time_goes_back_to_the_roofline() -> None:
    time = KERNELS["H100"].time
    near, far = Gemm("g", 4096, 4096, 4096), Gemm("g", 4096, 4096, 10**8)
    assert time(far).sigma > 1.3 * time(near).sigma
    assert 0.5 < floor_ns(H100, far) / time(far).ns < 1


def test_a_gpu_without_tables_is_extrapolated_throughout() -> None:
    kernels = KERNELS["L4"]
    assert isinstance(kernels, TransferredKernels)
    for operation in (Gemm("g", 64, 4096, 4096), decodes(16, 1000), Elementwise("n", 1e6)):
        time = kernels.time(operation)
        assert time.level == TrustLevel.EXTRAPOLATED
        assert time.sigma >= 0.25
        assert 1 / 3 < floor_ns(kernels.gpu, operation) / time.ns <= 1 or time.ns < 50_000


def test_a_type_that_was_not_tabulated_is_stood_in_for() -> None:
    time = KERNELS["A100-80G"].time
    stood_in, own = time(decodes(64, 1000, "fp8")), time(decodes(64, 1000))
    assert stood_in.level == TrustLevel.EXTRAPOLATED
    assert stood_in.sigma > own.sigma


@pytest.mark.parametrize("name", sorted(gpus().keys() - {"H20"}))  # whose tensor cores are too slow for its memory
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_narrow_weights_of_one_row_are_near_the_bandwidth(name: str, dtype: str) -> None:
    """Kernels that unpack narrow weights have small tiles, so that a decode step is not bound by padded rows."""
    gemm = Gemm("gate and up", 1.0, 28_672, 4096, dtype)
    gpu = find_gpu(name)
    assert float(floor_ns(gpu, gemm) / load_kernels(gpu).time(gemm).ns) > 0.5


def test_small_messages_take_the_custom_all_reduce() -> None:
    time = KERNELS["H100"].time
    small, beyond = (time(Collective("c", "all_reduce", 8, elements)).ns for elements in (2**17, 2**17 + 1))
    assert beyond > 1.05 * small  # 256 KiB is vLLM's limit for eight GPUs of that kind


# Fits


def synthetic(truth: Efficiency, noise: float, seed: int = 0) -> list[Measured]:
    draw = np.random.default_rng(seed)
    m = np.array([1.0, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192])
    measured = []
    for n in (512, 1024, 2048, 4096, 8192, 16384):
        for k in (1024, 2048, 4096, 8192):
            operation = Gemm("", m, n, k)
            ns = structure_of(operation).ns(H100, operation, truth)
            measured.append(Measured("gemm/bfloat16", operation, ns * np.exp(noise * draw.standard_normal(len(m)))))
    return measured


def test_coefficients_of_a_synthetic_table_are_recovered() -> None:
    truth = Efficiency(launch_ns=4000.0, compute=0.7, memory=0.8, unit_ns=3.0)
    fitted = fit_efficiency(H100, synthetic(truth, noise=0.03))
    assert fitted.launch_ns == pytest.approx(truth.launch_ns, rel=0.05)
    assert fitted.compute == pytest.approx(truth.compute, rel=0.05)
    assert fitted.memory == pytest.approx(truth.memory, rel=0.05)


def test_sigma_is_the_noise_of_the_table() -> None:
    fit, held_out = fit_kernel(H100, synthetic(Efficiency(4000.0, 0.7, 0.8, 3.0), noise=0.05))
    assert 0.04 < fit.surface.error < 0.08
    assert held_out.shapes_median < 0.06


def test_a_peculiar_region_of_shapes_is_learnt() -> None:
    table = [
        m._replace(ns=1.3 * m.ns) if m.operation.n >= 4096 else m for m in synthetic(Efficiency(4e3, 0.7, 0.8, 3), 0.01)
    ]
    fit, _ = fit_kernel(H100, table)
    kernels = KernelSurfaces(H100, {"gemm/bfloat16": fit})
    measured = {(m.operation.n, m.operation.k): m for m in table}
    for shape in ((1024, 4096), (8192, 4096)):
        m = measured[shape]
        assert np.median(np.abs(kernels.time(m.operation).ns / m.ns - 1)) < 0.03


# Files


def test_a_file_gives_back_what_was_written_byte_for_byte(tmp_path: Path) -> None:
    kernels = load_kernels(H100)
    assert isinstance(kernels, KernelSurfaces)
    for name in ("one", "two"):
        write_surfaces(tmp_path / name, kernels, {"source": "here"})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    again = read_surfaces(tmp_path / "one", H100)
    assert about_surfaces(tmp_path / "one") == {"source": "here"}
    for operation in (
        Gemm("g", 100, 28672, 4096),
        prompts(3, 700),
        decodes(50, 900),
        Collective("c", "all_reduce", 2, 9e5),
    ):
        assert again.time(operation).ns == pytest.approx(kernels.time(operation).ns, rel=0.01)


def test_damaged_and_foreign_files_are_refused_by_name(tmp_path: Path) -> None:
    whole = bundled("H100").read_bytes()
    cut, foreign, altered = tmp_path / "cut.parquet", tmp_path / "foreign.parquet", tmp_path / "altered.parquet"
    cut.write_bytes(whole[: len(whole) // 2])
    pq.write_table(pa.table({"a": [1]}), foreign)
    table = pq.read_table(bundled("H100"))
    pq.write_table(
        pa.concat_tables([table.slice(1), table.slice(0, 1)]).replace_schema_metadata(table.schema.metadata), altered
    )
    for path, why in (
        (cut, "readable"),
        (foreign, "some other Parquet"),
        (altered, "checksum"),
        (tmp_path / "no", "readable"),
    ):
        with pytest.raises(UserError, match=why) as caught:
            read_surfaces(path, H100)
        assert path.name in str(caught.value)
    with pytest.raises(UserError, match="is for H100, not for A100-80G"):
        read_surfaces(bundled("H100"), find_gpu("A100-80G"))


def test_bundled_fits_say_whose_they_are_and_are_small() -> None:
    assert {"A100-80G", "L40S", "H100", "H200", "B200", "B300", "RTX-PRO-6000"} <= set(bundled_names())
    for name in bundled_names():
        about = about_surfaces(bundled(name))
        of = ("LLMServingSim", "MIT") if name == "RTX-4090" else ("aiconfigurator", "Apache-2.0")
        assert of[0] in about["source"] and of[1] in about["licence"] and about["tables"]
        assert about["held_out"]["gemm/bfloat16"]["shapes_median"] < 0.06
        assert bundled(name).stat().st_size < 150 * 1024


def test_tables_that_cannot_be_used_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"has no gemm/vllm"):
        list(measurements(str(tmp_path), "H100"))
    with pytest.raises(UserError, match="has no kernel tables"):
        list(measurements(str(tmp_path), "RTX-4090"))
    folder = tmp_path / "gemm" / "vllm" / "1.0"
    folder.mkdir(parents=True)
    (folder / "gemm_perf.parquet").write_bytes(b"not Parquet")
    with pytest.raises(UserError, match="is not a readable Parquet file"):
        list(measurements(str(tmp_path), "H100"))
    pq.write_table(pa.table({"m": [1], "latency": [1.0]}), folder / "gemm_perf.parquet")
    with pytest.raises(UserError, match="no column gemm_dtype, k, n"):
        list(measurements(str(tmp_path), "H100"))
    assert main(["--tables", str(tmp_path), "--gpu", "H100", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: tables: ") and said.count("\n") == 1


def test_the_newest_release_of_a_table_is_read_and_the_fastest_kernel_counts(tmp_path: Path) -> None:
    for release, slower in (("0.9.1", 10.0), ("0.24.0", 1.0)):
        folder = tmp_path / "gemm" / "vllm" / release
        folder.mkdir(parents=True)
        rows = {"gemm_dtype": ["bfloat16"] * 3, "m": [2, 1, 1], "n": [64] * 3, "k": [32] * 3}
        pq.write_table(
            pa.table({**rows, "latency": [slower * t for t in (0.5, 0.4, 0.3)]}), folder / "gemm_perf.parquet"
        )
    first = next(measurements(str(tmp_path), "H100"))
    assert first.operation == replace(first.operation, n=64, k=32, dtype="bfloat16")
    assert first.operation.size.tolist() == [1, 2]
    assert first.ns.tolist() == [0.3e6, 0.5e6]  # milliseconds in the table


def test_tables_of_latent_attention_are_read_where_there_are_some(tmp_path, monkeypatch):
    monkeypatch.setattr(aiconfigurator, "_TABLES", [t for t in aiconfigurator._TABLES if not t.everywhere])
    assert list(measurements(str(tmp_path), "H100")) == []
    heads = {"num_heads": [16, 16], "latency": [0.2, 0.1]}
    attention = {**heads, "kv_cache_dtype": ["fp8", "fp8"], "batch_size": [4, 4]}
    for name, columns in {
        "mla/trtllm/1.0/context_mla": {**attention, "isl": [300, 200], "step": [0, 0]},
        "mla/trtllm/1.0/generation_mla": {**attention, "step": [299, 199]},
        "mla_bmm/vllm/1.0/mla_bmm": {**heads, "op_name": ["mla_gen_pre"] * 2, "bmm_dtype": ["bfloat16"] * 2,
                                     "num_tokens": [8, 4]},
    }.items():  # fmt: skip
        path = tmp_path / f"{name}_perf.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path)
    prefill, decode, gemm = (measured.operation for measured in measurements(str(tmp_path), "H100"))
    assert isinstance(prefill, LatentPrefill) and isinstance(decode, LatentDecode) and isinstance(gemm, HeadGemm)
    assert (prefill.heads, prefill.head_dim, prefill.value_dim, prefill.tokens.tolist()) == (16, 192, 128, [800, 1200])
    assert (decode.heads, decode.head_dim, decode.value_dim, decode.context.tolist()) == (16, 576, 512, [800, 1200])
    assert (gemm.heads, gemm.n, gemm.k, gemm.m.tolist()) == (16, 512, 128, [4, 8])
    for key in ("mla_prefill/fp8", "mla_decode/fp8", "head_gemm/bfloat16"):  # there and back
        measured = next(m for m in measurements(str(tmp_path), "H100") if m.key == key)
        structure = structure_of(measured.operation)
        again = operation_at(key, structure.shape(measured.operation), structure.sizes(measured.operation))
        assert np.allclose([again.flops, again.bytes], [measured.operation.flops, measured.operation.bytes])


# The tables themselves


HELD_OUT = {  # of shapes: the most that the median and the 90th percentile may be
    "gemm/bfloat16": (0.04, 0.12),
    "gemm/fp8": (0.06, 0.18),
    "prefill/bfloat16": (0.06, 0.13),
    "decode/bfloat16": (0.03, 0.12),
    "experts/mxfp4": (0.08, 0.20),
}


@needs_tables
def test_errors_held_out_of_the_tables_are_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are bundled, and of the quickest fits anew."""
    again = ("gemm/bfloat16", "decode/bfloat16")
    monkeypatch.setattr(fit, "measurements", lambda *of: (m for m in measurements(*of) if m.key in again))
    _, about = fit_kernels(str(TABLES / "h200_sxm"), find_gpu("H200"))
    bundled_errors = about_surfaces(bundled("H200"))["held_out"]
    assert about["held_out"].keys() == set(again)
    for key in again:
        assert about["held_out"][key] == pytest.approx(bundled_errors[key], abs=0.002)
    for key, (median, p90) in HELD_OUT.items():
        assert bundled_errors[key]["shapes_median"] < median
        assert bundled_errors[key]["shapes_p90"] < p90


@needs_tables
def test_bundled_times_are_the_tables_times() -> None:
    """Of dense GEMMs with the shapes of Llama-3.1-8B, what is bundled misses the table by its noise."""
    kernels = KERNELS["H100"]
    missed = [
        np.log(kernels.time(m.operation).ns / m.ns)
        for m in measurements(str(TABLES / "h100_sxm"), "H100")
        if isinstance(m.operation, Gemm)
        and m.key == "gemm/bfloat16"
        and (m.operation.n, m.operation.k) in {(6144, 4096), (4096, 4096)}
    ]
    assert len(missed) == 2
    assert np.median(np.abs(np.concatenate(missed))) < 0.03
    assert abs(np.median(np.concatenate(missed))) < 0.01


def test_every_gpu_of_the_catalogue_has_an_identity_and_times_a_step() -> None:
    assert len({identity(name) for name in bundled_names()}) == len(bundled_names())
    plan = StepPlan(0, DecodeSet(16), 0)
    plan.add_decodes(8, 8 * 500, 8 * 500**2)
    times = {}
    for name in gpus():
        assert len(identity(name)) == 12
        times[name] = predicted_cost(name, Deployment(model="Llama-3.1-8B", device="cuda")).step_ns(plan)
    by_bandwidth = sorted(gpus().values(), key=lambda gpu: gpu.memory_bytes_per_s)
    assert times[by_bandwidth[-1].name] < times[by_bandwidth[0].name]


# Precision

NARROWER = ["fp8", "fp8_block", "int4", "int8", "mxfp4", "nvfp4"]


@given(
    gpu=st.sampled_from(["H100", "L40S", "B200", "RTX-PRO-6000", "L4"]),
    m=tokens,
    n=st.sampled_from([1024, 4096, 5000, 28672]),
    k=st.sampled_from([2048, 8192]),
    dtype=st.sampled_from(NARROWER),
)
def test_less_precision_is_never_slower_at_equal_shape(gpu: str, m: int, n: int, k: int, dtype: str) -> None:
    kernels = PRECISE.setdefault(gpu, load_kernels(find_gpu(gpu)))
    for operation in (Gemm("g", m, n, k, dtype), Experts("e", m, k, n, 4, 128, dtype=dtype)):
        ns = never_slower(operation, kernels).ns
        for wider in ("bfloat16", "fp8") if "fp4" in dtype and kernels.gpu.fp4_flop_per_s else ("bfloat16",):
            assert ns <= never_slower(replace(operation, dtype=wider), kernels).ns * (1 + 1e-9)


PRECISE: dict[str, KernelTimes] = {}


@pytest.mark.parametrize("dtype", ["mxfp4", "nvfp4"])
def test_four_bits_on_hopper_are_read_and_computed_in_sixteen(dtype: str) -> None:
    time = KERNELS["H100"].time
    few, many = (Gemm("g", m, 8192, 8192, dtype) for m in (4.0, 16384.0))
    assert not H100.has_unit_for(dtype)
    wide = [time(replace(operation, dtype="bfloat16")).ns for operation in (few, many)]
    assert time(few).ns < 0.5 * wide[0]
    assert time(many).ns == pytest.approx(wide[1], rel=0.02)
    assert time(few).level == TrustLevel.EXTRAPOLATED
