"""The `fleet` section of a deployment: its defaults, what it refuses, and what a pool's own settings do."""

from pathlib import Path

import pytest
import yaml

from tokentwin.planning.deployments import with_settings
from tokentwin.serving.deployments.config import Deployment, load_deployment, parse, pool_deployment
from tokentwin.serving.deployments.fleet import FleetConfig
from tokentwin.serving.errors import UserError
from tokentwin.sim.router import find_router

YAML = """
model: random:llama
tensor_parallel_size: 2
scheduler: {max_num_seqs: 64, num_blocks: 9000}
fleet:
  pools:
    - {name: big, replicas: 3, slo_classes: [chat]}
    - {name: small, replicas: 5, speed: 0.5, deployment: {tensor_parallel_size: 1, scheduler: {num_blocks: 4000}}}
  router: {name: power-of-two, settings: {seed: 7}}
  admission:
    max_queued_per_replica: 100
    queue_timeout_s: 30
    patience: {mean_s: 20}
    retry: {max_attempts: 3}
  failures: {mtbf_s: 86400, crashes: [{at_s: 60, pool: small}]}
  autoscaler: {metric: queue, target: 4, max_replicas: 12, pool: big}
"""

APART = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}, {"name": "s"}]


def test_one_file_describes_a_fleet(tmp_path):
    (tmp_path / "fleet.yaml").write_text(YAML)
    deployment = load_deployment(tmp_path / "fleet.yaml")
    fleet = deployment.fleet
    assert [(pool.name, pool.replicas, pool.speed) for pool in fleet.pools] == [("big", 3, 1.0), ("small", 5, 0.5)]
    assert [scaler.target for scaler in fleet.autoscaler] == [4] and fleet.admission.retry.max_attempts == 3
    assert parse(Deployment, deployment.model_dump(), where="again") == deployment
    assert Deployment.model_validate_json(deployment.model_dump_json()) == deployment


def test_several_pools_may_each_have_an_autoscaler():
    both = [{"target": n, "max_replicas": 9, "pool": pool} for n, pool in ((1, "d"), (2, "p"))]
    fleet = parse(FleetConfig, {"pools": APART, "autoscaler": both}, where="fleet")
    assert [(scaler.pool, scaler.target) for scaler in fleet.autoscaler] == [("d", 1), ("p", 2)]
    assert parse(FleetConfig, fleet.model_dump(), where="again") == fleet
    assert FleetConfig.model_validate_json(fleet.model_dump_json()) == fleet


def test_one_autoscaler_is_a_mapping_whose_settings_have_names():
    deployment = parse(Deployment, yaml.safe_load(YAML), where="d")
    (scaler,) = with_settings(deployment, {"fleet.autoscaler.target": 7}).fleet.autoscaler
    assert scaler == deployment.fleet.autoscaler[0].model_copy(update={"target": 7})


def test_a_pool_changes_what_it_names_and_nothing_else(tmp_path):
    deployment = parse(Deployment, yaml.safe_load(YAML), where="d")
    big, small = (pool_deployment(deployment, pool) for pool in deployment.fleet.pools)
    assert big == deployment.model_copy(update={"fleet": None})
    assert small.tensor_parallel_size == 1
    assert small.scheduler == deployment.scheduler.model_copy(update={"num_blocks": 4000})


def test_step_times_do_not_depend_on_the_fleet():
    deployment = parse(Deployment, yaml.safe_load(YAML), where="d")
    assert deployment.timing() == deployment.model_copy(update={"fleet": None}).timing()


def test_the_default_is_one_replica_and_a_router_may_be_a_name():
    assert [(pool.name, pool.replicas) for pool in FleetConfig().pools] == [("pool", 1)]
    assert parse(FleetConfig, {"router": "random"}, where="fleet").router.name == "random"


@pytest.mark.parametrize(
    "fleet, named",
    [
        ({"pools": []}, "pools"),
        ({"pools": [{"replicas": 0}]}, "a fleet needs at least one replica"),
        ({"pools": [{"name": "a"}, {"name": "a"}]}, "different names"),
        ({"pools": [{"replica": 2}]}, "replica"),
        ({"pools": [{"speed": 0}]}, "speed"),
        ({"router": {"nam": "random"}}, "nam"),
        ({"admission": {"max_queued": 0}}, "max_queued"),
        ({"admission": {"patience": {"mean_s": float("inf")}}}, "mean_s"),
        ({"failures": {"crashes": [{"at_s": 1, "pool": "x"}]}}, "'x'"),
        ({"autoscaler": {"target": 1, "max_replicas": 3, "pool": "x"}}, "'x'"),
        ({"autoscaler": {"target": 1, "max_replicas": 3, "min_replicas": 4}}, "min_replicas"),
        ({"autoscaler": {"target": 0.9, "max_replicas": 3, "metric": "attainment"}}, "slo_ms"),
        ({"autoscaler": {"target": 1.5, "max_replicas": 3, "metric": "kv"}}, "share"),
        ({"autoscaler": {"target": 1, "max_replicas": 3, "interval_s": 0}}, "interval_s"),
        ({"autoscaler": []}, "autoscaler"),
        ({"autoscaler": 3}, "autoscaler"),
        (
            {"autoscaler": [{"target": 1, "max_replicas": 3, "pool": name} for name in (None, "pool")]},
            "give each its own pool",
        ),
        ({"pools": [{"role": "prefill"}]}, "add a pool of role decode"),
        ({"pools": [{"role": "decode"}, {"name": "b"}]}, "add a pool of role prefill"),
        ({"links": {}}, "links"),
        ({"decode_router": "random"}, "decode_router"),
        ({"first_token_from": "decode"}, "first_token_from"),
        ({"failures": {"link_losses": [{"at_s": 1, "for_s": 1, "pool": "pool"}]}}, "failures.link_losses"),
        ({"pools": APART, "links": {"nic_gb_s": 0}}, "nic_gb_s"),
        ({"pools": APART, "failures": {"link_losses": [{"at_s": 1, "for_s": 1, "pool": "s"}]}}, "no links"),
    ],
)
def test_what_cannot_be_is_one_line(fleet, named):
    with pytest.raises(UserError) as error:
        parse(FleetConfig, fleet, where="fleet")
    assert named in str(error.value) and str(error.value).startswith("fleet") and "\n" not in str(error.value)


@pytest.mark.parametrize("override", [{"tensor": 2}, {"scheduler": {"num_block": 3}}, {"fleet": {}}, {"threads": 0}])
def test_a_wrong_pool_setting_names_pool_and_setting(override):
    pool = FleetConfig(pools=({"name": "odd", "deployment": override},)).pools[0]
    with pytest.raises(UserError) as error:
        pool_deployment(Deployment(), pool)
    assert str(error.value).startswith("fleet.pools.odd.deployment.") and "\n" not in str(error.value)


@pytest.mark.parametrize("number, pools", [(1, ["chat", "rest"]), (2, ["prefill", "decode"])])
def test_the_examples_of_the_manual_are_valid(tmp_path, number, pools):
    manual = (Path(__file__).parents[2] / "docs/fleet.md").read_text(encoding="utf-8")
    (tmp_path / "example.yaml").write_text(manual.split("```yaml\n")[number].split("```")[0], encoding="utf-8")
    fleet = load_deployment(tmp_path / "example.yaml").fleet
    assert [pool.name for pool in fleet.pools] == pools
    find_router(fleet.router.name, **fleet.router.settings)
