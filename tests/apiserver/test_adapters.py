"""Adapters at OpenAI's API: a client asks for one as the model, and the twin's recording says which answered."""

import pyarrow.parquet as pq
import pytest

from apiserver.settings import ServeSettings
from serving.errors import UserError
from tests.apiserver.served import serving

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
    workload = pq.read_table(tmp_path / "out" / "workload.parquet")
    assert workload["adapter"].to_pylist() == ["", "medical", "legal"]


def test_what_does_not_go_together_is_one_line():
    with pytest.raises(UserError, match=r"lora_modules.*works only on a twin"):
        ServeSettings(lora_modules="a")
    with pytest.raises(UserError, match=r"lora_modules.*cannot be combined with kv_events"):
        ServeSettings(twin=True, gpu="H100", lora_modules="a", kv_events="tcp://127.0.0.1:5557")
