"""The plain Python that plans the attention kernels' launches; `interpreted.py` checks the kernels themselves."""

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from tokentwin.realengine.kernels import launches  # noqa: E402
from tokentwin.realengine.kernels.paged_attention import make_tiles, tile_for, tile_tokens  # noqa: E402


def test_tiles_hold_each_query_token_once_and_start_with_the_longest() -> None:
    rows = [(4, 70, 70), (5, 1, 900), (6, 33, 500), (7, 32, 32)]
    tile_row, tile_first = make_tiles(rows, 32)
    assert tile_row.dtype == tile_first.dtype == np.int32
    assert list(zip(tile_row.tolist(), tile_first.tolist(), strict=True)) == [
        (5, 0), (6, 32), (6, 0), (4, 64), (4, 32), (4, 0), (7, 0),
    ]  # fmt: skip


def test_no_rows_make_no_tiles() -> None:
    tile_row, tile_first = make_tiles([], 32)
    assert tile_row.shape == tile_first.shape == (0,)


@pytest.mark.parametrize(("heads", "kv_heads", "few", "many"), [(32, 8, 16, 64), (9, 3, 21, 85), (28, 4, 9, 36)])
def test_a_tile_holds_whole_groups_and_more_tokens_in_long_steps(heads, kv_heads, few, many):
    assert tile_tokens(tile_for(2048, False), heads, kv_heads) == few
    assert tile_tokens(tile_for(2049, False), heads, kv_heads) == many
    assert tile_tokens(tile_for(2049, True), heads, kv_heads) == few  # batch-invariant


@pytest.mark.skipif(launches.INTERPRETING, reason="the interpreter has no dependent launches")
@pytest.mark.parametrize(("capability", "has"), [((8, 0), False), ((9, 0), True), ((10, 3), True)])
def test_launches_overlap_from_sm_90_on(capability, has, monkeypatch):
    monkeypatch.setattr(launches, "_of_gpu", lambda index: capability)
    arguments = launches.dependent_launch(torch.device("cuda", 0))
    assert arguments == ({"PDL": True, "launch_pdl": True} if has else {"PDL": False})
    assert launches.dependent_launch(torch.device("meta"))["PDL"]  # as what is compiled ahead
