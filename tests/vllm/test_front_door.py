"""Our API server and vLLM's answer the same requests alike: the same model, greedy, in float32.

vLLM is the norm. What differs on purpose has a name in `door_cases.py` and a row in docs/serving-api.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.apiserver.served import serving
from tests.vllm.door_answers import answer, differences, families
from tests.vllm.door_cases import CASES, Case
from tests.vllm.environment import needs_vllm
from tests.vllm.served_vllm import vllm_serving

pytestmark = [pytest.mark.deep, pytest.mark.engine, pytest.mark.vllm, needs_vllm, pytest.mark.timeout(1500)]


class Doors(NamedTuple):
    """The addresses of vLLM and of our server."""

    vllm: tuple[str, int]
    ours: tuple[str, int]


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    from tokentwin.planning.home import home
    from tokentwin.realengine.models.smollm2 import fetch

    folder, model = tmp_path_factory.mktemp("doors"), fetch(home())
    alike = ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16", "--max-num-batched-tokens", "512"]
    named = ("--served-model-name", "m", "--device", "cpu", "--num-blocks", "400")
    with (
        vllm_serving(folder, model, *alike, "--enforce-eager", "--block-size", "32") as vllm,
        serving(folder, "--model", model, *named, *alike) as ours,
    ):
        yield Doors(vllm, ours.address)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_we_answer_as_vllm_does(case: Case, doors: Doors) -> None:
    norm, ours = answer(doors.vllm, case), answer(doors.ours, case)
    found = list(differences(norm, ours))
    assert bool(found) == bool(case.differs), "\n".join([json.dumps(norm), json.dumps(ours), *found])


def test_metrics_have_vllms_names_types_and_labels(doors: Doors) -> None:
    scrape = Case("metrics", "/metrics", None, method="GET")
    norm, ours = (families(str(answer(address, scrape)["document"])) for address in doors)
    missing = norm.keys() - ours.keys()
    assert missing and all(name.startswith("vllm:estimated_") for name in missing)  # of FLOPs and bytes
    ours.pop("vllm:tool_call_parser_invocations_total", None)  # vLLM has it if a parser was named at start
    cache = "vllm:cache_config_info"
    assert set(ours[cache][1]) < set(norm[cache][1])
    assert {name: norm[name] for name in ours if name != cache} == {n: ours[n] for n in ours if n != cache}
