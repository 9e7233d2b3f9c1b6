"""An attention backend that is not ours: found by module, by file and by entry point, and told apart when it fails."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from tests.realengine.test_engine_loop import engine_for, plain, run  # noqa: E402, F401
from tokentwin.serving.errors import UserError  # noqa: E402

pytestmark = pytest.mark.engine

BACKEND = '''
"""Token by token, from the definition, with plans made on the host as a library's are."""
import numpy as np
import torch


class Plain:
    capturable = "always"

    def __init__(self, spec, deployment, device):
        self.page, self.group = deployment.scheduler.block_size, spec.num_heads // spec.num_kv_heads
        self.prepared = []

    def tiles(self, rows):
        return np.zeros(0, np.int32), np.zeros(0, np.int32)

    def prepare(self, batch, captured):
        self.prepared.append(captured)
        names = ("query_start", "query_len", "context", "table_start")
        self.rows = list(zip(*(batch.on_host(name) for name in names)))

    def plan(self, batch):
        return batch.blocks

    def attend(self, queries, blocks, kv):
        out = torch.zeros_like(queries)
        for first, count, context, start in self.rows:
            at = torch.arange(context)
            block = blocks[start + at // self.page].long()
            keys, values = (x[block, :, at % self.page].repeat_interleave(self.group, 1) for x in (kv.keys, kv.values))
            for token in range(count):
                seen = context - count + token + 1
                scores = torch.einsum("hd,chd->hc", queries[first + token], keys[:seen]) * queries.shape[-1] ** -0.5
                out[first + token] = torch.einsum("hc,chd->hd", scores.softmax(1), values[:seen])
        return out


class NoAttend:
    def tiles(self, rows): ...
    def prepare(self, batch, captured): ...
    def plan(self, batch): ...


class Failing(Plain):
    def attend(self, queries, blocks, kv):
        raise ValueError("no such kernel")


class Unable(Plain):
    def __init__(self, spec, deployment, device):
        raise NotImplementedError("no heads of 16 dimensions")


class Odd(Plain):
    capturable = True
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on the import path with a module, and with what an installed package would have beside it."""
    (tmp_path / "plain_attention.py").write_text(BACKEND)
    metadata = tmp_path / "plain_attention-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-attention\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tokentwin.attention]\nplain = plain_attention:Plain\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["plain", "plain_attention:Plain", "{folder}/plain_attention.py:Plain"])
def test_one_of_your_own_gives_the_same_tokens(name: str, folder: Path, plain: list[list[int]]) -> None:  # noqa: F811
    engine = engine_for(attention=name.format(folder=folder))
    engine.runner.graph_mixed_steps(name == "plain")
    outputs, steps = run(engine, drawn=True)
    assert outputs == plain
    assert engine.runner.attention.name == name.format(folder=folder)
    assert engine.runner.attention._backend.prepared == [step.graph for step in steps]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "nothing",
            r"attention: 'nothing': must be auto, torch, unfused, triton, hybrid, varlen, .*, plain, or your own path",
        ),
        ("plain_attention:Nobody", "has no Nobody"),
        ("plain_attention:NoAttend", "must be a class with tiles, prepare, plan, attend"),
        ("plain_attention:Unable", "cannot be made: NotImplementedError: no heads of 16 dimensions"),
        ("plain_attention:Odd", "capturable must be never, decode, always, not True"),
        ("plain_attention:Failing", "attend failed: ValueError: no such kernel"),
    ],
)
def test_what_is_wrong_with_it_is_one_line(name: str, said: str, folder: Path) -> None:
    with pytest.raises(UserError, match=said):
        run(engine_for(attention=name))
