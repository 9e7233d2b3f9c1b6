"""A server under load as operators see it: Prometheus, the dashboard and the alerts of `deploy/`, and a collector."""

import json
import re
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from math import isfinite
from shutil import which
from threading import Event
from time import monotonic
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from tests.apiserver.collector import attributes, collector
from tests.apiserver.served import TWIN, serving
from tests.apiserver.test_deploy import DEPLOY, needs_promtool
from tests.apiserver.test_live_metrics import OURS, VLLM, Scraped, families
from tokentwin.apiserver.request_spans import PHASES

STREAMS = 12
MODEL = "Llama-3.1-8B"


@pytest.fixture(scope="module")
def collecting():
    with collector() as made:
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory, collecting):
    """A twin of two replicas that is rarely without streams."""
    folder = tmp_path_factory.mktemp("served")
    more = ("--replicas", "2", "-o", folder / "recording", "--otlp-endpoint", collecting.url)
    with serving(folder, *TWIN, *more) as made, Load(made):
        yield made


class Load:
    """Clients that ask again and again, `STREAMS` at a time, with prompts that begin alike."""

    def __init__(self, server):
        self._server, self._enough = server, Event()
        self._numbers = count()

    def __enter__(self):
        self._pool = ThreadPoolExecutor(STREAMS)
        self._clients = [self._pool.submit(self._ask) for _ in range(STREAMS)]

    def _ask(self):
        while not self._enough.is_set():
            number = next(self._numbers)
            own = 2000 + number * 20 % 25_000
            prompt = [*range(1000, 1128), *range(own, own + 20)]
            asked = self._server.complete(prompt=prompt, max_tokens=20 + number % 20, stream=number % 4 > 0)
            assert asked.status == 200, asked.body

    def __exit__(self, *error):
        self._enough.set()
        for client in self._clients:
            client.result()
        self._pool.shutdown()


def until(what, seconds=60):
    """The first result of `what` that is true."""
    deadline, pause = monotonic() + seconds, Event()
    while not (value := what()):
        assert monotonic() < deadline, what
        pause.wait(0.1)
    return value


# What it says itself


def test_all_of_vllms_metrics_are_there_and_move(server):
    scraped = until(lambda: moved(server))
    assert set(families(server.ask("GET", "/metrics").body)) == set(VLLM) | OURS
    assert scraped.engines() == {"0", "1"}
    assert scraped["prefix_cache_hits_total"] > 0
    lateness = families(server.ask("GET", "/metrics").body)["tokentwin:lateness_seconds"].samples
    assert families(server.ask("GET", "/metrics").body)["tokentwin:recording"].samples[0].value == 1
    tokens = next(sample.value for sample in lateness if sample.name.endswith("_count"))
    assert 0 < tokens <= Scraped(server.ask("GET", "/metrics").body)["generation_tokens_total"]


def moved(server):
    scraped = Scraped(server.ask("GET", "/metrics").body)
    enough = scraped["request_success_total", "finished_reason=length"] > 2 * STREAMS
    return scraped if enough and scraped["num_requests_running"] > 0 else None


@needs_promtool
def test_promtool_objects_to_nothing_but_vllms_own_names(server):
    text = server.ask("GET", "/metrics").body
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    objections = {tuple(line.split(" ", 1)) for line in checked.stderr.decode().splitlines()}
    total = ("vllm:iteration_tokens_total", 'non-counter metrics should not have "_total" suffix')
    assert total in objections and checked.stdout == b""
    assert {objection for _, objection in objections - {total}} == {"metric names should not contain ':'"}


def test_a_clients_trace_goes_on_in_the_server(server, collecting):
    trace, parent = f"{7:032x}", f"{9:016x}"
    headers = {"traceparent": f"00-{trace}-{parent}-01", "X_Request_Id": "mine"}
    server.ask("POST", "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4, "stream": True}, **headers)

    def mine():
        return [span for span in collecting.spans if span.trace_id.hex() == trace]

    spans = until(lambda: mine() if len(mine()) > len(PHASES) else None)
    (whole,) = [span for span in spans if span.parent_span_id.hex() == parent]
    assert whole.name == f"text_completion {MODEL}" and {span.name for span in spans} - {whole.name} == set(PHASES)
    sent = attributes(whole)
    assert (sent["gen_ai.response.id"], sent["gen_ai.request.model"]) == ("mine", MODEL)
    assert (sent["gen_ai.usage.input_tokens"], sent["gen_ai.usage.output_tokens"]) == (3, 4)


# Prometheus, and what deploy/ makes of it


@pytest.fixture(scope="module")
def prometheus(server, tmp_path_factory):
    """A function that asks a Prometheus with the configuration of `deploy/`, which scrapes the server often."""
    if which("prometheus") is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "200ms", "evaluation_interval": "200ms"}
    config["rule_files"] = [str(DEPLOY / "prometheus/alerts.yml")]
    config["scrape_configs"][0]["static_configs"] = [{"targets": ["{}:{}".format(*server.address)]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )

    def ask(path, **query):
        with urlopen(f"http://{address}/api/v1/{path}?{urlencode(query)}", timeout=30) as answer:
            return json.load(answer)["data"]

    def scraped():
        assert process.poll() is None, (folder / "log").read_text()
        try:
            return ask("query", query="min(count_over_time(up[1m])) > 20")["result"]
        except OSError:
            return None

    try:
        until(scraped)
        until(lambda: moved(server))
        yield ask
    finally:
        process.terminate()
        process.wait(30)


def test_prometheus_has_every_metric_with_its_type_and_help(prometheus, server):
    (target,) = prometheus("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    known = prometheus("metadata")
    for family in families(server.ask("GET", "/metrics").body).values():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert [(metric["type"], metric["help"]) for metric in known[name]] == [(family.type, family.documentation)]


def dashboard_queries():
    panels = json.loads((DEPLOY / "grafana/tokentwin.json").read_text())["panels"]
    return [pytest.param(t["expr"], id=f"{p['title']}-{t['refId']}") for p in panels for t in p["targets"]]


@pytest.mark.parametrize("query", dashboard_queries())
def test_every_query_of_the_dashboard_finds_something(prometheus, query):
    asked = query.replace("$__rate_interval", "30s").replace("$model_name", MODEL)
    series = prometheus("query", query=asked)["result"]
    assert series and all(isfinite(float(one["value"][1])) for one in series)


def test_alerts_are_evaluated_and_an_easy_load_raises_none_that_tells_of_trouble(prometheus):
    (group,) = prometheus("rules")["groups"]
    rules = {rule["name"]: rule for rule in group["rules"]}
    written = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    assert set(rules) == {rule["alert"] for rule in written}
    assert all(rule["health"] == "ok" for rule in rules.values())
    assert {rules[name]["state"] for name in ("ServerDown", "RequestsWait", "RequestsAreRefused", "KvCacheIsFull")} == {
        "inactive"
    }


def test_the_autoscalers_metric_comes_out_of_the_adapters_rule(prometheus):
    (rule,) = yaml.safe_load((DEPLOY / "kubernetes/prometheus-adapter.yaml").read_text())["rules"]["custom"]
    name = re.match(r"[\w:]+", rule["seriesQuery"])[0]
    asked = rule["metricsQuery"].replace("<<.Series>>", name)
    asked = asked.replace("<<.LabelMatchers>>", 'model_name!=""').replace("<<.GroupBy>>", "instance")
    (queue,) = prometheus("query", query=asked)["result"]
    assert float(queue["value"][1]) >= 0
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes/tokentwin.yaml").read_text()))
    (scaler,) = [document for document in documents if document["kind"] == "HorizontalPodAutoscaler"]
    assert [document["pods"]["metric"]["name"] for document in scaler["spec"]["metrics"]] == [rule["name"]["as"]]


def test_probes_ask_for_what_the_server_answers(server):
    documents = {
        document["kind"]: document
        for document in yaml.safe_load_all((DEPLOY / "kubernetes/tokentwin.yaml").read_text())
    }
    template = documents["Deployment"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    probes = {name: probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")}
    assert len(probes) == 3
    for probe in probes.values():
        assert server.ask("GET", probe["path"]).status == 200 and probe["port"] == container["ports"][0]["name"]
    annotations = template["metadata"]["annotations"]
    assert server.ask("GET", annotations["prometheus.io/path"]).status == 200
    assert annotations["prometheus.io/port"] == str(container["ports"][0]["containerPort"])
    assert documents["Service"]["spec"]["selector"] == template["metadata"]["labels"]
    assert (
        documents["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"]
        == (documents["Deployment"]["metadata"]["name"])
    )
