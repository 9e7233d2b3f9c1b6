"""A policy file of a user: code that runs only behind a flag, and never in the server."""

from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("streamlit")

from click.testing import CliRunner

import tokentwin.dashboard.server
from tests.dashboard.pages import shown
from tokentwin.commands.dashboard import dashboard as command
from tokentwin.dashboard.own_policy import classes, keep_policy
from tokentwin.dashboard.plan_page import tasks as plan_tasks
from tokentwin.dashboard.policy_lab_page.tasks import simulated
from tokentwin.dashboard.sweeps_page.tasks import check_sweep
from tokentwin.planning.compare.document import ComparisonDocument
from tokentwin.planning.plan.document import PlanDocument
from tokentwin.planning.progress import quiet
from tokentwin.serving.errors import UserError

POLICY = b"""from tokentwin.serving.policies.ranked import RankedScheduler

class _Hidden: ...

class ShortestPrompt(RankedScheduler):
    def score(self, request):
        return request.prompt_len
"""
LINK = {"b": "own", "req_s": "10", "seconds": "4", "seeds": "1"}


def opened_page(page, folder, allowed, **link):
    from streamlit.testing.v1 import AppTest

    def script(page, folder, allowed):
        from importlib import import_module
        from pathlib import Path

        import_module(f"tokentwin.dashboard.{page}_page.page").show(Path(folder), own_policies=allowed)

    app = AppTest.from_function(script, args=(page, str(folder), allowed), default_timeout=300)
    for name, value in link.items():
        app.query_params[name] = value
    return app.run()


lab = partial(opened_page, "policy_lab")


def test_without_the_flag_the_page_says_what_to_type(tmp_path):
    digest = keep_policy(tmp_path, POLICY)
    said = shown(lab(tmp_path, False, **LINK, b_own=f"{digest}:ShortestPrompt"))
    assert "tokentwin dashboard RUNS_DIR --own-policies" in said and "policy=my_policy.py:MyPolicy" in said


def test_an_own_policy_is_compared_by_the_job(tmp_path, started):
    assert "Upload the policy file of B." in shown(lab(tmp_path, True, **LINK))
    app = lab(tmp_path, True, **LINK, b_own=keep_policy(tmp_path, POLICY))
    assert next(box for box in app.selectbox if box.label == "Class").options == ["ShortestPrompt"]
    next(button for button in app.button if button.label == "Compare").click().run()
    (job,) = started
    policy = job.settings["b"]["settings"]["policy"]
    assert policy.startswith(f"{tmp_path}/uploads/policy-") and policy.endswith("policy.py:ShortestPrompt")
    answer = ComparisonDocument.read(simulated(job.settings, tmp_path, quiet))
    assert answer.b.deployment.policy == policy and answer.a.deployment.policy == "vllm"


def test_an_own_policy_is_planned_and_swept_by_jobs_and_never_run_by_the_server(tmp_path, started):
    own = keep_policy(tmp_path, POLICY + b"open(__file__ + '.ran', 'w')\n")
    path = f"{tmp_path}/uploads/policy-{own}/policy.py"
    link = {"policies": "vllm,own", "own": own, "requests": "50", "rates": "2", "seeds": "1"}
    traffic = {"traffic": "shape", "prompt": "200", "output": "8", "rate": "2", "minutes": "1"}
    for page, typed, button, more in (
        ("plan", "tokentwin plan TRACE", "find", traffic | {"model": "Llama-3.1-8B", "tp": "1"}),
        ("sweeps", "tokentwin sweep FILE", "start_sweep", {"do": "start"}),
    ):
        link |= {"gpus": "H100"} | more
        closed = shown(opened_page(page, tmp_path, False, **link))
        assert "tokentwin dashboard RUNS_DIR --own-policies" in closed and typed in closed
        opened_page(page, tmp_path, True, **link).button(key=button).click().run()
    plan_job, sweep_job = started
    assert plan_job.settings["policies"] == ["vllm", f"{path}:ShortestPrompt"]
    assert sweep_job.settings["sweep"]["grid"]["deployment.policy"] == ["vllm", f"{path}:ShortestPrompt"]
    assert not Path(f"{path}.ran").exists()
    engines = PlanDocument.read(plan_tasks.plan(plan_job.settings, tmp_path, quiet)).candidates
    assert list(engines) == ["TP1 H100", "TP1 H100 policy.py:ShortestPrompt"] and Path(f"{path}.ran").exists()
    with pytest.raises(UserError, match="policy"):
        check_sweep(sweep_job.settings["sweep"])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"class A(:\n", "is no valid Python in line 1"),
        (b"x = 1\n", "defines no class"),
        (b"class _A: ...\n", "defines no class"),
        (b"\x00", "is no valid Python"),
        (b"(" * 100_000, "is no valid Python"),
        (b"#" * 200_001, "is too large"),
    ],
)
def test_what_is_no_policy_is_one_line(tmp_path, content, says):
    with pytest.raises(UserError) as refused:
        keep_policy(tmp_path, content)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_is_read_and_not_run():
    assert classes(b"raise SystemExit\nclass A: ...\n") == ["A"]


@pytest.mark.parametrize(
    ("arguments", "served"),
    [([], False), (["--own-policies"], True), (["--own-policies", "--host", "0.0.0.0", "--password", "x"], True)],
)
def test_the_flag_reaches_the_server_and_needs_a_password_on_a_network(arguments, served, monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(tokentwin.dashboard.server, "serve", lambda *arguments: given.append(arguments[-1]))
    assert CliRunner().invoke(command, [str(tmp_path), "--port", "18512", *arguments]).exit_code == 0
    assert given == [served]
    refused = CliRunner().invoke(command, [str(tmp_path), "--own-policies", "--host", "0.0.0.0"])
    assert isinstance(refused.exception, UserError) and "give --password" in str(refused.exception)
