"""Adapters at OpenAI's API: a client asks for one as the model, and the twin's recording says which answered."""

import pyarrow.parquet as pq
import pytest

from tests.apiserver.served import serving
from tests.apiserver.test_live_metrics import families
from tokentwin.apiserver.settings import ServeSettings
from tokentwin.serving.errors import UserError

DEPLOYMENT = "model: Llama-3.1-8B\ndevice: cuda\ngpu_memory_utilization: 0.9\nlora: {max_loras: 1}\n"


def test_an_adapter_is_asked_for_as_the_model(tmp_path):
    (tmp_path / "lora.yaml").write_text(DEPLOYMENT)
    options = ("--twin", "--gpu", "H100", "-d", tmp_path / "lora.yaml", "--lora-modules", "legal, medical")
    with serving(tmp_path, *options, "-o", tmp_path / "out") as server:
        base, *adapters = server.ask("GET", "/v1/models").document["data"]
        assert [(one["id"], one["parent"]) for one in adapters] == [("legal", base["id"]), ("medical", base["id"])]
        for name in (base["id"], "medical", "legal"):
            assert server.complete(model=name, max_tokens=2).document["model"] == name
        assert server.complete(model="tax").status == 404
        scraped = families(server.ask("GET", "/metrics").body)
        (lora,) = scraped["vllm:lora_requests_info"].samples
        assert lora.labels == {"max_lora": "1", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        asked = {
            sample.labels["status"]: sample.value
            for sample in scraped["http_requests"].samples
            if sample.labels["handler"] == "/v1/completions"
        }
        assert asked == {"2xx": 3, "4xx": 1}
    workload = pq.read_table(tmp_path / "out" / "workload.parquet")
    assert workload["adapter"].to_pylist() == ["", "medical", "legal"]


@pytest.mark.engine
def test_the_real_engine_answers_with_the_adapter_that_is_asked_for(tmp_path):
    """The oracle is transformers with the adapter merged into its weights; without --lora-modules all are served."""
    pytest.importorskip("torch", reason="the engine extra is not installed")
    pytest.importorskip("transformers", reason="transformers is the oracle here; install the dev extra")
    from tests.realengine.peft_folders import save_adapter
    from tests.realengine.tiny_chat_model import save_chat_model
    from tests.realengine.tiny_models import greedy
    from tokentwin.realengine.tokenizer import Tokenizer

    model, folder = tmp_path / "model", tmp_path / "adapters"
    judges = {str(model): save_chat_model(model)}
    judges |= {
        name: save_adapter(folder / name, judges[str(model)], rank, rank, 4.0) for rank, name in ((2, "a"), (4, "b"))
    }
    (tmp_path / "d.yaml").write_text(
        f"model: {model}\ndtype: float32\nscheduler: {{num_blocks: 500}}\nlora: {{max_loras: 1, adapters: {folder}}}\n"
    )
    prompt, texts = [5, 17, 40, 3], Tokenizer(model)
    with serving(tmp_path, "-d", tmp_path / "d.yaml", "--device", "cpu", "-o", tmp_path / "out") as server:
        assert [one["id"] for one in server.ask("GET", "/v1/models").document["data"]] == list(judges)
        for name, judge in judges.items():
            choice = server.complete(model=name, prompt=prompt, max_tokens=8, temperature=0, ignore_eos=True).choice
            assert choice["text"] == texts.decode(greedy(judge, [prompt], 8)[0]), name
        assert server.complete(model="c").status == 404
    assert pq.read_table(tmp_path / "out" / "workload.parquet")["adapter"].to_pylist() == ["", "a", "b"]
    loads = [
        step["loads"] for step in pq.read_table(tmp_path / "out" / "steps.parquet")["adapters"].to_pylist() if step
    ]
    assert sum(loads) == 2


def test_what_does_not_go_together_is_one_line():
    with pytest.raises(UserError, match=r"lora_modules.*cannot be combined with kv_events"):
        ServeSettings(twin=True, gpu="H100", lora_modules="a", kv_events="tcp://127.0.0.1:5557")
