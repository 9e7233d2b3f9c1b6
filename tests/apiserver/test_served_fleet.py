"""The fleet that a twin serves, its failures, and requests that it must refuse."""

import json
from collections.abc import Sequence
from pathlib import Path
from socket import create_connection

import pytest
import yaml

from tests.apiserver.served_command import free_ports
from tests.command import tokentwin
from tokentwin.apiserver.backends import tokenizer_folder
from tokentwin.apiserver.failures import Accidents, CutAnswers, RefusedRequests, ServedFailures
from tokentwin.apiserver.served_fleet import served_fleet
from tokentwin.apiserver.settings import ServeSettings
from tokentwin.apiserver.supervisor import _accept_connections, _bound, _ports_in_a_row
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.fleet import Crash, FleetConfig
from tokentwin.serving.errors import UserError

TWIN = {"twin": True, "gpu": "H100"}
POOLS = [{"name": "big", "replicas": 2}, {"name": "small", "replicas": 1}]


def deployment(**fleet: object) -> Deployment:
    return Deployment(fleet=FleetConfig.model_validate(fleet))


def test_a_port_for_each_replica_is_a_pool_for_each_in_which_its_failures_stay() -> None:
    crashes = [{"at_s": 1, "replica": 1}, {"at_s": 2, "pool": "small"}, {"at_s": 3, "replica": 2}]
    given = deployment(pools=POOLS, failures={"crashes": crashes})
    fleet = served_fleet(ServeSettings(**TWIN, ports_per_replica=True), given).fleet
    assert fleet is not None
    assert [(pool.name, pool.replicas, pool.slo_classes) for pool in fleet.pools] == [
        ("big-0", 1, ("port-0",)),
        ("big-1", 1, ("port-1",)),
        ("small-0", 1, ("port-2",)),
    ]
    assert fleet.failures.crashes == (Crash(at_s=1, pool="big-1"), Crash(at_s=2, pool="small-0"))


def test_failures_given_take_the_place_of_the_fleets_own() -> None:
    given = deployment(pools=POOLS, failures={"mtbf_s": 100})
    own = served_fleet(ServeSettings(**TWIN), given).fleet
    changed = served_fleet(ServeSettings(**TWIN, failures={"crashes": [{"at_s": 5}], "refusals": [{}]}), given).fleet
    assert own is not None and changed is not None
    assert own.failures.mtbf_s == 100
    assert changed.failures.mtbf_s is None and [crash.at_s for crash in changed.failures.crashes] == [5]


@pytest.mark.parametrize(
    ("fleet", "field"),
    [
        ({"pools": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]}, "fleet.pools.p"),
        ({"pools": [{"slo_classes": ["gold"]}]}, "fleet.pools.pool"),
        ({"autoscaler": {"target": 1, "max_replicas": 2}}, "fleet.autoscaler"),
    ],
)
def test_what_a_port_for_each_replica_leaves_to_a_gateway_is_refused(fleet: dict[str, object], field: str) -> None:
    with pytest.raises(UserError) as error:
        served_fleet(ServeSettings(**TWIN, ports_per_replica=True), deployment(**fleet))
    assert error.value.field == field


def test_accidents_have_their_while_their_share_and_their_replica() -> None:
    refused = RefusedRequests(at_s=10, for_s=5, status=429)
    rare = RefusedRequests(share=0.25)
    at_one = CutAnswers(replica=1, after_tokens=7)
    accidents = Accidents(ServedFailures(refusals=(refused, rare), cuts=(at_one,), seed=5))
    assert [accidents.refusal(0, None, s) is refused for s in (9.9, 10.0, 14.9, 15.0)] == [False, True, True, False]
    befallen = sum(accidents.refusal(id, None, 0.0) is rare for id in range(4000))
    assert abs(befallen - 1000) < 4 * 28  # four standard deviations
    again = Accidents(ServedFailures(refusals=(refused, rare), seed=5))
    other = Accidents(ServedFailures(refusals=(refused, rare), seed=6))
    drawn = [[made.refusal(id, None, 0.0) for id in range(50)] for made in (accidents, again, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert (accidents.cut(0, 1, 0.0), accidents.cut(0, 0, 0.0)) == (at_one, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-events", "5557"], "kv-events: "),
        (["--kv-events", "tcp://10.0.0.300:5557"], "kv_events.endpoint: 'tcp://10.0.0.300:5557': cannot be had"),
        (["--kv-events", '{"endpoint": "tcp://no host:1", "connect": true}'], "'tcp://no host:1': cannot be had"),
        (["--kv-events", '{"endpoint": "tcp://127.0.0.1:1", "topic": "{pod}"}'], "may contain {replica}, {port} and"),
        (["--ports-per-replica", "--router", "random"], "leave one out"),
        (["--failures", '{"refusals": [{"status": 600}]}'], "failures.refusals.0.status: 600"),
        (["--tokenizer", "no-such/tokenizer"], "tokenizer: 'no-such/tokenizer': has no tokenizer.json"),
        (["--failures", '{"refusals": [{"replica": 1}]}'], "replica needs ports_per_replica"),
        (["--failures", '{"crashes": [{"at_s": 1, "pool": "west"}]}'], "west"),
        (["--failures", "nowhere.yaml"], "failures: 'nowhere.yaml': cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options: Sequence[str], message: str) -> None:
    done = tokentwin("serve", "--twin", "--gpu", "H100", "--model", "Llama-3.1-8B", "--port", "0", *options)
    assert done.returncode == 2
    assert message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_folder_with_only_a_vocabulary_of_tiktoken_is_no_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--maker--Spoken-7B" / "snapshots" / "a"
    folder.mkdir(parents=True)
    for name in ("config.json", "tiktoken.model"):
        (folder / name).touch()
    with pytest.raises(UserError, match="has no tokenizer"):
        tokenizer_folder(str(folder), "Llama-3.1-8B")
    assert tokenizer_folder("", "Spoken-7B") == ""  # four characters count as one token


@pytest.mark.parametrize("engine", [("--twin", "--gpu", "H100"), ("--device", "cpu", "--model", "random:llama")])
def test_events_of_a_cache_that_is_off_are_refused(engine: Sequence[str], tmp_path: Path) -> None:
    if "--twin" not in engine:
        pytest.importorskip("torch", reason="the engine extra is not installed")
    path = tmp_path / "deployment.yaml"
    path.write_text("scheduler: {enable_prefix_caching: false}")
    endpoint = f"tcp://127.0.0.1:{free_ports(1)}"
    done = tokentwin("serve", *engine, "--port", "0", "-d", path, "--kv-events", endpoint)
    assert done.returncode == 2 and "leave enable_prefix_caching on" in done.stderr


@pytest.mark.parametrize(
    ("given", "seed"),
    [("tcp://*:1", "42"), ('{"endpoint": "tcp://*:1"}', "42"), ('{"endpoint": "tcp://*:1", "hash_seed": "7"}', "7")],
)
def test_the_seed_of_hashes_is_where_vllm_finds_it(given: str, seed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServeSettings] = []
    monkeypatch.setenv("PYTHONHASHSEED", "42")
    monkeypatch.setattr("tokentwin.apiserver.supervisor.serve", lambda settings, *more: served.append(settings))
    assert tokentwin("serve", "--twin", "--gpu", "H100", "--kv-events", given).returncode == 0
    assert [settings.kv_events and settings.kv_events.hash_seed for settings in served] == [seed]


def test_a_file_of_failures_is_read(tmp_path: Path) -> None:
    path = tmp_path / "failures.json"
    path.write_text(json.dumps({"cuts": [{"share": 2}]}))
    done = tokentwin("serve", "--twin", "--gpu", "H100", "--failures", path)
    assert done.returncode == 2 and "failures.cuts.0.share: 2" in done.stderr


def test_the_failures_of_the_documentation_can_be_read() -> None:
    page = Path("docs/twin-in-a-gateway.md").read_text()
    given = yaml.safe_load(page.partition("```yaml")[2].partition("```")[0])
    settings = ServeSettings(**TWIN, replicas=2, ports_per_replica=True, failures=given)
    fleet = served_fleet(settings, Deployment()).fleet
    assert fleet is not None and len(fleet.failures.crashes) == len(fleet.failures.slowdowns) == 1


def test_ports_in_a_row_are_listened_on_or_none() -> None:
    ports = _ports_in_a_row("127.0.0.1", 0, 3)
    first = ports[0].getsockname()[1]
    with pytest.raises(ConnectionRefusedError):  # until there is an engine
        create_connection(("127.0.0.1", first), 5)
    _accept_connections(ports)
    create_connection(("127.0.0.1", first), 5).close()
    assert [port.getsockname()[1] for port in ports] == [first, first + 1, first + 2]
    ports[0].close()
    with pytest.raises(UserError, match="cannot be listened on"):
        _ports_in_a_row("127.0.0.1", first, 2)
    _bound("127.0.0.1", first).close()
    for port in ports[1:]:
        port.close()
    with pytest.raises(UserError, match="65536"):
        _ports_in_a_row("127.0.0.1", 65535, 2)


def test_only_a_twin_has_them() -> None:
    done = tokentwin("serve", "--failures", "{}")
    assert done.returncode == 2 and "add --twin" in done.stderr
