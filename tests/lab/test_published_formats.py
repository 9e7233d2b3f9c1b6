"""Readers of published tables: LLMServingSim's logs and AIConfigurator's measured deployments."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import PRIVATE
from tokentwin.traces.measured.formats import measured_format
from tokentwin.traces.measured.run import MeasuredRun

LLMSERVINGSIM = "lab.external.llmservingsim:LlmServingSim"
SILICON_TABLE = "lab.external.silicon_table:SiliconTable"
SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="the measured runs are not here: no ../shared/data")


def read(data: Path, **settings: Any) -> list[MeasuredRun]:
    return measured_format(settings, "measured").read(data)


def ideal_hit_share(run: MeasuredRun) -> float:
    """Return the share of prompt tokens in whole segments with which an earlier prompt began, too."""
    seen: set[str] = set()
    hits = total = 0
    for request in run.workload.requests:
        fresh = False
        for name, tokens in request.prompt:
            fresh = fresh or name == PRIVATE or name not in seen
            hits += 0 if fresh else tokens
            total += tokens
        seen |= {name for name, _ in request.prompt}
    return hits / total


# LLMServingSim


def llmservingsim(folder: Path, **changed: Any) -> None:
    lines = [
        # 40 prompt tokens in chained blocks 1, 2; the second shares the first block; the engine's clock is 900 s behind
        {"request_id": "a", "input_toks": 40, "output_toks": 3, "arrival_time": 1000.0, "queued_ts": 100.01,
         "scheduled_ts": 100.02, "first_token_ts": 100.51, "last_token_ts": 100.71},
        {"request_id": "b", "input_toks": 20, "output_toks": 2, "arrival_time": 1002.0, "queued_ts": 102.04,
         "scheduled_ts": 102.05, "first_token_ts": 102.21, "last_token_ts": 102.31, **changed},
    ]  # fmt: skip
    blocks = [
        {"arrival_time_ns": 0, "input_toks": 40, "output_toks": 3, "hash_ids_16": [1, 2], "n_prompt_blocks_16": 2},
        {"arrival_time_ns": 2, "input_toks": 20, "output_toks": 2, "hash_ids_16": [1], "n_prompt_blocks_16": 1},
    ]
    for name, rows in (("requests.jsonl", lines), ("workload_hashed.jsonl", blocks)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_llmservingsim_aligns_two_clocks_and_chains_blocks(tmp_path: Path) -> None:
    llmservingsim(tmp_path)
    (run,) = read(tmp_path, format=LLMSERVINGSIM, folder=".")
    first, second = run.workload.requests
    assert (first.arrival_ns, second.arrival_ns) == (0, 2 * 10**9)
    assert first.prompt == (("h1", 16), ("h2", 16), (PRIVATE, 8)) and second.prompt == (("h1", 16), (PRIVATE, 4))
    assert (first.output_len, second.output_len) == (3, 2)
    # The least queued - arrival is 0.01 s by both clocks: TTFTs are 0.5 and 0.2 s from there.
    assert run.figures["ttft_ms.mean"] == pytest.approx(350) and run.figures["tpot_ms.mean"] == pytest.approx(100)
    assert run.workload.shares_prefixes


def test_llmservingsim_needs_no_count_of_prompt_blocks_but_an_id_for_each(tmp_path: Path) -> None:
    llmservingsim(tmp_path)
    (counted,) = read(tmp_path, format=LLMSERVINGSIM, folder=".")
    path = tmp_path / "workload_hashed.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        del row["n_prompt_blocks_16"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (uncounted,) = read(tmp_path, format=LLMSERVINGSIM, folder=".")
    assert list(uncounted.workload.requests) == list(counted.workload.requests)
    rows[1]["hash_ids_16"] = []
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"workload_hashed.jsonl:2: hash_ids_16.*each of the 1 full prompt blocks"):
        read(tmp_path, format=LLMSERVINGSIM, folder=".")


def test_llmservingsim_refuses_a_token_before_its_request(tmp_path: Path) -> None:
    llmservingsim(tmp_path, first_token_ts=101.0)
    with pytest.raises(UserError, match=r"requests.jsonl:2: first_token_ts.*must lie between"):
        read(tmp_path, format=LLMSERVINGSIM, folder=".")


@needs_data
def test_the_rtx_pro_6000_run_is_what_its_readme_says() -> None:
    (run,) = read(SHARED, format=LLMSERVINGSIM, folder="llmservingsim/vllm0.19.0_RTXPRO6000_Llama-3.1-8B")
    assert len(list(run.workload.requests)) == 300
    assert ideal_hit_share(run) == pytest.approx(0.076, abs=0.0005)
    assert run.figures["ttft_ms.mean"] == pytest.approx(7100, rel=0.005)  # from arrival; 7.10 s from the queue
    assert run.figures["tpot_ms.mean"] == pytest.approx(32.5, abs=0.05)
    assert run.figures["makespan_s"] == pytest.approx(65.9, abs=0.05)


# AIConfigurator's table

HEADER = "id,silicon_data_source,backend,backend_version,model_path,system,precision,isl,osl,batch_size,tp_size,pp_size,attention_dp_size,moe_tp_size,moe_ep_size,silicon_ttft_ms,silicon_tpot_ms,mode,decode_tp_size"  # noqa: E501


def table(folder: Path, *rows: Mapping[str, str]) -> None:
    columns = HEADER.split(",")
    common = {"backend": "vllm", "model_path": "m", "system": "h", "isl": "100", "osl": "10", "batch_size": "4",
              "tp_size": "2", "silicon_ttft_ms": "50", "silicon_tpot_ms": "10"}  # fmt: skip
    lines = [",".join({**common, "id": f"row{i}", **row}.get(c, "") for c in columns) for i, row in enumerate(rows)]
    (folder / "table.csv").write_text("\n".join([HEADER, *lines]) + "\n")


def rows_of(folder: Path, *rules: Mapping[str, Any]) -> list[MeasuredRun]:
    return read(folder, format=SILICON_TABLE, file="table.csv", systems={"h": "H100"}, rules=list(rules))


def conc(concurrency: int, **row: str) -> dict[str, str]:
    return {"silicon_data_source": f"a; silicon_concurrency={concurrency}", **row}


def test_a_row_is_a_closed_loop_of_ten_waves(tmp_path: Path) -> None:
    table(tmp_path, conc(3), {"batch_size": "5", "attention_dp_size": "2", "moe_ep_size": "4"})
    rules: list[dict[str, Any]] = [{"load": {"lengths": [0.8, 1]}, "deployment": {"scheduler": {"max_num_seqs": 7}}}]
    plain, spread = rows_of(tmp_path, *rules)
    requests = list(plain.workload.requests)
    assert (plain.workload.concurrency, len(requests), plain.gpu) == (3, 30, "H100")
    assert {r.arrival_ns for r in requests} == {0} and all(80 <= r.prompt_len <= 100 for r in requests)
    assert all(8 <= r.output_len <= 10 for r in requests) and len({r.prompt_len for r in requests}) > 5
    assert plain.settings == {"tensor_parallel_size": 2, "scheduler": {"max_num_seqs": 7}}
    assert spread.workload.concurrency == 3, "one of two ranks has half of five requests, rounded up"
    assert (spread.settings["data_parallel_size"], spread.settings["enable_expert_parallel"]) == (2, True)
    assert plain.figures == {"ttft_ms.mean": 50.0, "tpot_ms.mean": 10.0}


def pool(workers: int, **more: object) -> dict[str, Any]:
    return {"workers": workers, "devices": 8, **more}


def test_rows_with_prefill_and_decode_apart_have_every_published_configuration(tmp_path: Path) -> None:
    apart = {"mode": "disagg", "tp_size": "", "decode_tp_size": "8"}
    table(
        tmp_path,
        conc(36, **apart),
        conc(72, **apart),
        conc(36),
        conc(9, **apart),
        conc(36, **apart, backend="b", silicon_tpot_ms="9"),
    )
    published = [
        {"isl": 100, "concurrency": 36, "prefill": pool(1), "decode": pool(9), "when": {"backend": "vllm"}},
        {"isl": 100, "concurrency": 36, "prefill": pool(1), "decode": pool(11), "drafts": 3},
        {"isl": 100, "concurrency": 72, "prefill": pool(2), "decode": pool(7, attention_dp=True)},
    ]
    runs = read(tmp_path, format=SILICON_TABLE, file="table.csv", systems={"h": "H100"}, rules=[{}], apart=published)
    assert [run.name for run in runs] == ["row0", "row1", "row4"]  # not the one with both together, nor an unknown one
    assert [len(run.or_settings) for run in runs] == [1, 0, 0]
    first, (drafting,), data = runs[0].settings, runs[0].or_settings, runs[1].settings
    assert (first["tensor_parallel_size"], first["data_parallel_size"]) == (8, 1) and "scheduler" not in first
    assert drafting["scheduler"]["speculative"]["num_speculative_tokens"] == 3
    assert [pool["replicas"] for pool in drafting["fleet"]["pools"]] == [1, 11]
    prefill, decode = data["fleet"]["pools"]
    assert prefill["deployment"] == {"tensor_parallel_size": 8, "data_parallel_size": 1}
    assert decode["deployment"] == {"tensor_parallel_size": 1, "data_parallel_size": 8}
    runs = read(tmp_path, format=SILICON_TABLE, file="table.csv", systems={"h": "H100"}, rules=[{}], search=16)
    assert [run.name for run in runs] == ["row0", "row1", "row3", "row4"]
    assert {run.most_workers for run in runs} == {16} and {run.lengths for run in runs} == {(100, 10)}


def test_a_row_may_have_had_another_deployment(tmp_path: Path) -> None:
    table(tmp_path, conc(4), conc(4, model_path="other"))
    rules = [
        {"deployment": {"model": "a", "scheduler": {"max_model_len": 99}}},
        {"when": {"model_path": "other"}, "or_deployment": {"scheduler": {"max_num_seqs": 7}}},
    ]
    sure, either = rows_of(tmp_path, *rules)
    assert sure.or_settings == [] and sure.settings == either.settings
    assert either.or_settings == [{**either.settings, "scheduler": {"max_model_len": 99, "max_num_seqs": 7}}]


def test_a_script_s_formula_and_day(tmp_path: Path) -> None:
    day = "silicon_concurrency=40; measured=2026-01-20T10:00:00"
    table(tmp_path, {"silicon_data_source": day}, conc(40), conc(40, attention_dp_size="4"))
    rules = [{"budget": {"running": 4, "plus": 64}}, {"before": "2026-01-21", "client": "early"}]
    early, late, ranks = rows_of(tmp_path, *rules)
    assert (early.client, late.client) == ("early", "")
    budgets = [run.settings["scheduler"]["max_num_batched_tokens"] for run in (early, late, ranks)]
    assert budgets == [384, 384, 256]  # 100 + 4 x 40 + 64, and 100 + 4 x 10 + 64, in multiples of 64


def test_later_rules_win_and_apply_to_their_rows_only(tmp_path: Path) -> None:
    table(tmp_path, conc(4), conc(4, model_path="other", attention_dp_size="4"))
    rules: list[dict[str, Any]] = [
        {"deployment": {"model": "a", "scheduler": {"max_model_len": 99}}},
        {"when": {"model_path": "other"}, "deployment": {"model": "b"}, "columns": {"attention_dp_size": "1"},
         "seqs_as_concurrency": True, "caution": "odd"},
    ]  # fmt: skip
    first, second = rows_of(tmp_path, *rules)
    assert (first.settings["model"], first.caution) == ("a", "")
    assert (second.settings["model"], second.caution) == ("b", "odd")
    assert second.settings["scheduler"] == {"max_model_len": 99, "max_num_seqs": 4}
    assert "data_parallel_size" not in second.settings


def test_repeats_give_a_floor_and_rows_out_of_order_a_caution(tmp_path: Path) -> None:
    tpots = {4: "10", 8: "12", 16: "30", 32: "15", 512: "5"}
    rows = [conc(c, silicon_tpot_ms=tpot) for c, tpot in tpots.items()]
    table(tmp_path, *rows, conc(4, silicon_tpot_ms="11"), conc(8, silicon_tpot_ms="12"))
    runs = rows_of(tmp_path)
    assert runs[0].floor_pct["tpot_ms.mean"] == pytest.approx(100 / 10.5) == runs[5].floor_pct["tpot_ms.mean"]
    assert not runs[1].floor_pct, "the same to the last digit is one measurement written twice"
    assert "disagree" in runs[0].caution
    assert "concurrency 32" in runs[2].caution and "does not fit" in runs[4].caution
    assert not runs[1].caution and not runs[3].caution


def test_a_row_of_an_unnamed_system_is_refused(tmp_path: Path) -> None:
    table(tmp_path, conc(4, system="b"))
    with pytest.raises(UserError, match=r"table.csv:2: system: 'b': must be one of h"):
        rows_of(tmp_path)


@needs_data
def test_the_h100_table_has_its_237_rows() -> None:
    runs = read(SHARED, format=SILICON_TABLE, file="aiconfigurator/silicon_sample_h100_vllm_agg.csv",
                systems={"h100_sxm": "H100"})  # fmt: skip
    assert len(runs) == 237 and len({run.group["model"] for run in runs}) == 4
    assert all(run.figures["tpot_ms.mean"] > 1 for run in runs)
