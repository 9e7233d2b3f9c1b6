"""Files in `deploy/`, as far as they can be checked against the code without a server."""

import json
import re
import subprocess
from pathlib import Path
from shutil import which

import pytest
import yaml

from tokentwin.apiserver.families import OF_THE_SERVER, of_an_engine
from tokentwin.commands.serve import serve

DEPLOY = Path(__file__).parents[2] / "deploy"
SAMPLES = {family.sample_name for family in (*OF_THE_SERVER, *of_an_engine(1024, draft_tokens=0))}

needs_promtool = pytest.mark.skipif(
    which("promtool") is None, reason="promtool is not installed: apt-get install prometheus"
)


@needs_promtool
def test_promtool_takes_the_configuration_and_the_rules():
    for what, file in (("config", "prometheus.yml"), ("rules", "alerts.yml")):
        checked = subprocess.run(
            ["promtool", "check", what, DEPLOY / "prometheus" / file], capture_output=True, text=True
        )
        assert checked.returncode == 0, checked.stderr


LABELS = 'instance="a:1",model_name="m"'
ENGINE, OTHER = (f'{LABELS},engine="{number}"' for number in range(2))
TROUBLE = {
    "ServerDown": {'up{job="tokentwin",instance="a:1"}': "0x20"},
    "RequestsWait": {
        f"vllm:num_requests_waiting{{{ENGINE}}}": "9x20",
        f"vllm:num_requests_running{{{ENGINE}}}": "8x20",
    },
    "FirstTokenIsSlow": {
        f'vllm:time_to_first_token_seconds_bucket{{{ENGINE},le="2.5"}}': "0+1x20",
        f'vllm:time_to_first_token_seconds_bucket{{{ENGINE},le="5.0"}}': "0+10x20",
        f'vllm:time_to_first_token_seconds_bucket{{{ENGINE},le="+Inf"}}': "0+10x20",
    },
    "KvCacheIsFull": {
        f"vllm:kv_cache_usage_perc{{{ENGINE}}}": "0.97x20",
        f"vllm:num_preemptions_total{{{ENGINE}}}": "0+3x20",
        f"vllm:kv_cache_usage_perc{{{OTHER}}}": "0.97x20",  # full, and nobody has to go
        f"vllm:num_preemptions_total{{{OTHER}}}": "0x20",
    },
    "RequestsAreRefused": {f'vllm:admission_rejections_total{{{LABELS},reason="max_num_queued_reqs"}}': "0+5x20"},
    "TokensAreLate": {
        f'tokentwin:lateness_seconds_bucket{{{LABELS},le="0.05"}}': "0+9x20",
        f'tokentwin:lateness_seconds_bucket{{{LABELS},le="0.1"}}': "0+10x20",
        f'tokentwin:lateness_seconds_bucket{{{LABELS},le="+Inf"}}': "0+10x20",
    },
}


@needs_promtool
def test_each_alert_is_raised_by_its_trouble_and_by_nothing_else(tmp_path):
    (group,) = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    assert {rule["alert"] for rule in group["rules"]} == set(TROUBLE)
    rules = tmp_path / "rules.yml"
    rules.write_text((DEPLOY / "prometheus/alerts.yml").read_text())
    tests = []
    for name, series in TROUBLE.items():
        query = f'count(ALERTS{{alertname!="{name}"}}) or count(ALERTS{{alertname="{name}",alertstate="firing"}})'
        tests.append(
            {
                "name": name,
                "interval": "1m",
                "input_series": [{"series": metric, "values": values} for metric, values in series.items()],
                "promql_expr_test": [
                    {"expr": query, "eval_time": "15m", "exp_samples": [{"labels": "{}", "value": 1}]}
                ],
            }
        )
    case = tmp_path / "test.yml"
    case.write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}))
    checked = subprocess.run(["promtool", "test", "rules", case], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr + checked.stdout


@pytest.mark.parametrize(
    "file", ["grafana/tokentwin.json", "prometheus/alerts.yml", "kubernetes/prometheus-adapter.yaml"]
)
def test_metrics_that_are_asked_for_exist(file):
    asked = set(re.findall(r"(?:vllm|tokentwin):\w+", (DEPLOY / file).read_text()))
    assert asked and {name.removesuffix("_bucket") for name in asked} <= SAMPLES


def test_panels_lie_side_by_side_and_have_numbers_of_their_own():
    panels = json.loads((DEPLOY / "grafana/tokentwin.json").read_text())["panels"]
    cells = {(x, y) for p in panels for x, y in [(p["gridPos"]["x"], p["gridPos"]["y"])]}
    assert len(cells) == len({panel["id"] for panel in panels}) == len(panels)


def test_containers_start_the_command_with_options_that_it_has():
    text = (DEPLOY / "Containerfile").read_text()
    entry, command = (json.loads(re.search(rf"^{word} (.*)$", text, re.MULTILINE)[1]) for word in ("ENTRYPOINT", "CMD"))
    assert entry[:2] == ["tokentwin", "serve"]
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes/tokentwin.yaml").read_text()))
    (container,) = documents[0]["spec"]["template"]["spec"]["containers"]
    for arguments in (command, container["args"]):
        asked = serve.make_context("serve", [*entry[2:], *arguments]).params
        assert asked["twin"] and asked["host"] == "0.0.0.0" and asked["port"] is None
    (base,) = re.findall(r"^ARG BASE=(\S+)", text, re.MULTILINE)
    assert re.search(r":\d+\.\d+\.\d+|@sha256:[0-9a-f]{64}", base)
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${BASE}"] * 2
    pod = documents[0]["spec"]["template"]["spec"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/tmp"]
    assert container["volumeMounts"][0]["name"] == pod["volumes"][0]["name"]
    assert (
        int(re.search(r"^USER (.*)$", text, re.MULTILINE)[1]) > 0
    )  # Kubernetes checks only a number with runAsNonRoot
    assert documents[0]["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"]
    kustomization = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())
    assert kustomization["images"][0]["name"] == container["image"].partition(":")[0]
    (port,) = container["ports"]
    assert f"EXPOSE {port['containerPort']}" in text and port["containerPort"] == 8000
