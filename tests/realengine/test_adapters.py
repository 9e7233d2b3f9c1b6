"""LoRA adapters on the engine: the oracle is transformers with the adapters merged into its weights in float64."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="transformers is the oracle here; install the dev extra")

from safetensors.torch import load_file, save_file  # noqa: E402

from tests.realengine.peft_folders import save_adapter  # noqa: E402
from tests.realengine.tiny_models import greedy, save  # noqa: E402
from tokentwin.realengine.engine import Engine  # noqa: E402
from tokentwin.realengine.models.weights import load_model_files  # noqa: E402
from tokentwin.realengine.replay import record  # noqa: E402
from tokentwin.realengine.step import Step  # noqa: E402
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig  # noqa: E402
from tokentwin.serving.errors import UserError  # noqa: E402
from tokentwin.serving.workload import Workload, WorkloadRequest  # noqa: E402
from tokentwin.traces.recording import Recording  # noqa: E402

pytestmark = pytest.mark.engine

SETTINGS = {"max_model_len": 128, "max_num_batched_tokens": 24, "num_blocks": 32, "block_size": 4, "max_num_seqs": 5}


def engine_for(model: str, lora: dict[str, Any], scheduler: dict[str, Any] | None = None, **more: Any) -> Engine:
    config = SchedulerConfig(**{**SETTINGS, **(scheduler or {})})
    whole = {"max_loras": 2, "max_lora_rank": 8, **lora}
    deployment = Deployment(**{"model": model, "dtype": "float32", "scheduler": config, "lora": whole, **more})
    return Engine(deployment, load_model_files(model, Path()))


@pytest.mark.parametrize(
    ("family", "overlapped", "drafts"), [("qwen2", False, None), ("qwen3", True, None), ("llama", True, "ngram")]
)
def test_answers_are_those_of_merged_weights(family: str, overlapped: bool, drafts: str | None, tmp_path: Path) -> None:
    """In batches that mix adapters and the base model, with chunks, shared prompts, preemptions and evictions."""
    model, folder = tmp_path / "model", tmp_path / "adapters"
    judge = save(family, model)
    judges = {
        "": judge.double(),
        "whole": save_adapter(folder / "whole", judge, 1, rank=8, alpha=8),
        "some": save_adapter(folder / "some", judge, 2, 4, 6.0, ("q_proj", "v_proj", "down_proj"), use_rslora=True),
        "small": save_adapter(folder / "small", judge, 3, 1, 1.0, ("k_proj", "o_proj", "up_proj")),
    }
    speculative = {"method": drafts, "num_speculative_tokens": 3} if drafts else None
    settings = {"async_scheduling": overlapped, "speculative": speculative, "scheduler_reserve_full_isl": False}
    engine = engine_for(str(model), {"adapters": str(folder)}, settings)
    chance = random.Random(4)
    shared = [chance.randrange(96) for _ in range(14)]
    asked = []
    for id in range(16):
        prompt = shared + [chance.randrange(96) for _ in range(chance.choice([1, 5, 30]))]
        asked.append((list(judges)[id % 4], prompt))
    states: dict[int, list[float]] = {}
    sequences = []
    for id, (name, prompt) in enumerate(asked):
        outputs = 0 if id % 5 == 4 else 12
        request = WorkloadRequest(id, 0, (("p", len(prompt)),), outputs, adapter=name)
        engine.add(request, prompt, on_pooled=lambda state, id=id: states.__setitem__(id, state))
        sequences.append(engine.sequences[id])
    steps: list[Step] = []
    while step := engine.step():
        steps.append(step)
    for name, merged in judges.items():
        mine = [id for id, (adapter, _) in enumerate(asked) if adapter == name]
        said = [id for id in mine if id not in states]
        assert [sequences[id].outputs for id in said] == greedy(merged, [asked[id][1] for id in said], 12), name
        for id in set(mine) & states.keys():
            with torch.no_grad():
                wanted = merged.model(torch.tensor([asked[id][1]])).last_hidden_state[0, -1]
            torch.testing.assert_close(torch.tensor(states[id]), wanted.float(), atol=2e-4, rtol=2e-4)
    used = [(step.adapters, step.plan.tokens) for step in steps if step.adapters is not None]
    assert any(len(its.slots) == 2 and its.tokens < tokens for its, tokens in used)
    assert sum(its.loads for its, _ in used) > 3  # an adapter that had given way has come back
    assert any(step.plan.preempted for step in steps)
    assert any(sequence.request.first_hit for sequence in sequences)


def test_loads_are_recorded_as_the_rule_of_places_demands(tmp_path: Path) -> None:
    """Against a plain list of uses, one request at a time; random adapters differ from one another."""
    lora = {"adapters": "random:4", "max_cpu_loras": 3}
    engine = engine_for("random:llama", lora, {"max_num_seqs": 1})
    names = [f"a{(7 * n + n // 3) % 5}" if n % 4 else "" for n in range(24)]
    asked = [WorkloadRequest(n, 0, (("same", 9),), 3, adapter=name) for n, name in enumerate(names)]
    record(Workload(asked, "adapters"), engine, tmp_path / "run")
    uses: list[str] = []
    for step in Recording.load(tmp_path / "run").steps.to_pylist():
        name, said = names[step["row_ids"][0]], step["adapters"]
        if not name:
            assert said is None
            continue
        last = list(dict.fromkeys(reversed(uses)))
        assert (said["adapters"], said["tokens"]) == (1, step["row_tokens"][0])
        assert (said["loads"], said["copies"]) == (name not in last[:3], name not in last[:2])
        assert (said["loads"] > 0) == (said["load_ns"] > 0) and (said["copies"] > 0) == (said["copy_ns"] > 0)
        uses.append(name)
    assert len(set(uses)) == 5 and engine.adapters is not None
    matrices = [engine.adapters._files.read(name) for name in ("a1", "a2", "a1")]
    one, two, again = (matrix["model.layers.0.mlp.down_proj"][1] for matrix in matrices)
    assert torch.equal(one, again) and not torch.allclose(one, two)


@pytest.mark.parametrize(
    ("deployment", "says"),
    [
        ({"lora": {}}, r"^lora.adapters: is missing; name the folder"),
        ({"lora": {"adapters": "nowhere"}}, r"^lora.adapters: 'nowhere': is not a folder"),
        ({"lora": {"adapters": "random:4", "load_ms": 3.0}}, r"^lora.load_ms: 3.0: is measured on the real engine"),
        ({"model": "random:mixtral"}, r"^lora: 'random:mixtral': is not known for models with experts"),
        ({"tensor_parallel_size": 2}, r"^tensor_parallel_size: 2: cannot be combined with lora on the real engine"),
        ({"quantization": "fp8"}, r"^quantization: 'fp8': cannot be fp8 with lora"),
        ({"policy": "tests.realengine.test_adapters:NoSlots"}, r"^policy: .*knows no slots for adapters"),
    ],
)
def test_what_does_not_go_together_is_one_line(deployment: dict[str, Any], says: str) -> None:
    whole = {"model": "random:llama", "lora": {"adapters": "random:4"}, **deployment}
    with pytest.raises(UserError, match=says):
        engine_for(**whole)


class NoSlots:
    """A policy that knows nothing of adapters."""

    def __init__(self, config: SchedulerConfig, **_: Any) -> None:
        self.config = config

    def add(self, *_: Any) -> None: ...

    schedule = commit = abort = steady_steps = skip = add


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"r": 16}, "has rank 16; raise lora.max_lora_rank, which is 8"),
        ({"r": 2}, r"lora_A.weight has shape \(4, \d+\), but this model and rank need \(2, \d+\)"),
        ({"peft_type": "IA3"}, "peft_type.*must be 'LORA'"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ("cut", "adapter_model.safetensors cannot be read"),
        ("half", r"has one matrix of model.layers.0.self_attn.q_proj, not both"),
        ("head", r"has base_model.model.lm_head.lora_A.weight, which is of no projection"),
        ("gone", r"^adapter: 'mine': has no adapter_config.json in a folder of its name in .*; there: none"),
    ],
)
def test_adapters_that_cannot_run_are_one_line(config: Any, says: str, tmp_path: Path) -> None:
    mine = tmp_path / "adapters" / "mine"
    save_adapter(mine, save("llama", tmp_path / "model"), 1, 4, 4.0)
    tensors, changed = mine / "adapter_model.safetensors", mine / "adapter_config.json"
    held = load_file(tensors)
    if config == "cut":
        tensors.write_bytes(tensors.read_bytes()[:100])
    elif config == "half":
        del held["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
        save_file(held, tensors)
    elif config == "head":
        save_file(held | {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)}, tensors)
    elif config == "gone":
        changed.unlink()
    else:
        changed.write_text(json.dumps(json.loads(changed.read_text()) | config))
    engine = engine_for(str(tmp_path / "model"), {"adapters": str(tmp_path / "adapters")})
    with pytest.raises(UserError, match=says):
        engine.add(WorkloadRequest(0, 0, (("p", 3),), 1, adapter="mine"), [1, 2, 3])
