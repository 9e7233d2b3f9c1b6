"""Features of the engine together: each combination gives the tokens of the plain engine, or is refused in one line."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="transformers makes the models; install the dev extra")

from tests.realengine.packed_checkpoints import write, write_fp8  # noqa: E402
from tests.realengine.tiny_models import save  # noqa: E402
from tokentwin.realengine.engine import Engine  # noqa: E402
from tokentwin.realengine.models.layer_ops import LayerOps  # noqa: E402
from tokentwin.realengine.models.weights import RANDOM, load_model_files  # noqa: E402
from tokentwin.realengine.sampling import SamplingParams  # noqa: E402
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig  # noqa: E402
from tokentwin.serving.errors import UserError  # noqa: E402
from tokentwin.serving.workload import WorkloadRequest  # noqa: E402

pytestmark = pytest.mark.engine

NGRAM = {"speculative": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
TIGHT = {"num_blocks": 34, "scheduler_reserve_full_isl": False}  # so tight that some requests are preempted
ASYNC = {"async_scheduling": True}
FP8 = {"kv_cache_dtype": "fp8"}
TIER = {"kv_tiers": {"tiers": [{"name": "cpu", "capacity_gib": 0.003, "read_gb_s": 10, "write_gb_s": 10}]}}


def drafted(folder: Path, name: str) -> dict[str, Any]:
    return {"speculative": {"model": str(folder / name), "num_speculative_tokens": 3}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    window = {"sliding_window": 9}
    save("llama", folder / "llama")
    save("mistral", folder / "window", window)
    save("mixtral", folder / "mixture")
    save("mixtral", folder / "mixture window", window)
    write(folder / "llama", folder / "int4", folder / "dense", "gptq symmetric")
    write(folder / "window", folder / "int4 window", folder / "dense window", "gptq symmetric")
    write(folder / "mixture window", folder / "int4 mixture", folder / "dense mixture", "awq")
    scales = {"k_scale": 0.5, "v_scale": 0.25}
    write_fp8(folder / "llama", folder / "fp8", folder / "dense fp8", "fbgemm_fp8", "nothing", scales)
    return folder


def engine(folder: Path, model: str, scheduler: dict[str, Any], settings: dict[str, Any]) -> Engine:
    usual = {"max_model_len": 128, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 40, "num_blocks": 120}
    config = SchedulerConfig.model_validate({**usual, **scheduler})
    deployment = Deployment.model_validate(
        {"model": str(folder / model), "dtype": "float32", "scheduler": config, **settings}
    )
    draft = config.speculative and config.speculative.model
    return Engine(
        deployment, load_model_files(str(folder / model), Path()), load_model_files(draft, Path()) if draft else None
    )


def outputs(made: Engine, padded: bool) -> list[list[int]]:
    """Return the outputs of ten prompts; every third begins alike, every other is drawn, two arrive before a step."""
    made.runner.graph_mixed_steps(padded)  # as on a GPU
    waiting, sequences = list(range(10)), []
    while waiting or made.scheduler.requests:
        for number in waiting[:2]:
            prompt = [at % 5 for at in range(20 * (number % 3 == 0))]
            prompt += [(7 * at + number * at * at) % 6 for at in range(3 + 4 * number)]
            how = SamplingParams(0.5, top_k=30, top_p=0.9, seed=number) if number % 2 else None
            made.add(WorkloadRequest(number, number, (("", len(prompt)),), 12), prompt, sampling=how)
            sequences.append(made.sequences[number])
        del waiting[:2]
        made.step()
    made.close()
    return [sequence.outputs for sequence in sequences]


@cache
def plain(folder: Path, model: str, kv_cache_dtype: str) -> list[list[int]]:
    return outputs(engine(folder, model, {}, {"kv_cache_dtype": kv_cache_dtype}), padded=False)


@pytest.mark.parametrize(
    ("model", "scheduler", "settings"),
    [
        ("mixture window", {**NGRAM, "num_blocks": 60}, FP8),
        ("mixture window", {**ASYNC, "prefix_cache_retention_interval": None}, FP8),
        ("int4 window", NGRAM, FP8),
        ("int4 window", {**NGRAM, **ASYNC, "num_blocks": 60}, {}),
        ("mixture", {**TIGHT, **ASYNC, "draft": "fp8"}, FP8),
        ("int4 window", ASYNC, {}),
        ("int4 mixture", {**NGRAM, **TIGHT}, FP8),
        ("mixture window", {**ASYNC, "draft": "int4"}, {}),
        ("fp8", {**TIGHT, "draft": "window"}, FP8),
        ("int4 window", {**NGRAM, **TIGHT}, TIER),
        ("fp8", TIGHT, {**FP8, **TIER}),
        ("int4", {**TIGHT, "draft": "mixture"}, FP8),
        ("mixture", {**TIGHT, "draft": "fp8"}, {}),
        ("mixture", {**TIGHT, **ASYNC}, {**FP8, **TIER}),
    ],
)
def test_tokens_are_those_of_the_plain_engine(folder, model, scheduler, settings):
    if name := (scheduler := dict(scheduler)).pop("draft", ""):
        scheduler |= drafted(folder, name)
    wanted = plain(folder, model, settings.get("kv_cache_dtype", "auto"))
    assert outputs(engine(folder, model, scheduler, settings), padded=True) == wanted


@pytest.mark.parametrize(
    ("model", "scheduler", "settings", "says"),
    [
        ("int4", {}, {"quantization": "fp8"}, "quantization: 'fp8': cannot be made of int4"),
        ("int4", {}, {"tensor_parallel_size": 2}, "tensor_parallel_size: 2: would split a group of 16"),
    ],
)
def test_what_does_not_go_together_is_one_line(folder, model, scheduler, settings, says):
    if name := (scheduler := dict(scheduler)).pop("draft", ""):
        scheduler |= drafted(folder, name)
    with pytest.raises(UserError, match=says):
        engine(folder, model, scheduler, settings)


def test_masks_stay_on_the_device_of_the_logits() -> None:
    """Structured answers beside torch's attention on a GPU; `meta` stands for any device but the CPU."""
    samples, bits = (torch.zeros(shape, dtype=torch.int32, device="meta") for shape in ((2,), (2, 3)))
    LayerOps(RANDOM["llama"]).mask(torch.zeros(5, 96, device="meta"), samples, bits)
