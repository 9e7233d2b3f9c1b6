"""A user's code that does anything but return, wherever it is called, ends in a one-line error."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError, one_line, raised, shown
from tokentwin.serving.scheduler import find_policy
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.user_code.call_limit import Fault, limited, time_limit, watching
from tokentwin.serving.user_code.own_cost import own_cost
from tokentwin.serving.user_code.plugins import user_threads

LOOP = "while True: pass"
MAKES = """
from tokentwin.serving.policies.vllm import VllmScheduler

class Mine(VllmScheduler):
    def __init__(self, config, **engine):
        super().__init__(config, **engine)
        while True: pass
"""
THREAD = """
import threading, time

def run():
    while True: time.sleep(0.001)

threading.Thread(target=run).start()

class Mine: pass
"""
SWALLOWS = """
import time
while True:
    try: time.sleep(1e6)
    except BaseException: pass
"""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokentwin.serving.user_code.call_limit.CALL_LIMIT_S", 0.05)


def make_policy(file: Path) -> None:
    find_policy(f"{file}:Mine")(Deployment().scheduler)


def price(file: Path) -> None:
    cost, plan = own_cost(f"{file}:Mine", Deployment()), StepPlan.from_amounts(decode_rows=3)
    cost.step_ns(plan)
    list(cost.decode_run_ns(3, 60, 1200, 2))


@pytest.mark.parametrize(
    ("call", "code", "says"),
    [
        (make_policy, LOOP, "cannot be imported: import() has not returned after 0.3 s"),
        (make_policy, f"def __getattr__(name):\n    {LOOP}", "cannot be imported: hasattr() has not returned"),
        (make_policy, MAKES, "cannot be made: Mine() has not returned after 0.3 s, the limit of one call"),
        (make_policy, THREAD, "starts a thread when it is imported, which does not end"),
        (
            price,
            f"def Mine(plan):\n    {LOOP}",
            "step_ns has not returned after 0.05 s, the limit of one call in a step",
        ),
        (price, f"class Mine:\n    def __init__(self):\n        {LOOP}\n    def step_ns(self, plan): return 1", "made"),
        (
            price,
            f"class Mine:\n    def step_ns(self, plan): return 1\n    def decode_run_ns(self, *run):\n        {LOOP}",
            "decode_run_ns has not returned after 0.05 s",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("in_thread", [False, True])
def test_what_never_returns_is_one_line(call: Any, code: str, says: str, in_thread: bool, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(code)
    lines: list[str] = []

    def attempt() -> None:
        with pytest.raises(UserError) as caught:
            call(tmp_path / "mine.py")
        lines.append(str(caught.value))

    if in_thread:
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
    else:
        attempt()
    assert says in lines[0] and "\n" not in lines[0]
    assert not user_threads()


def test_a_call_is_ended_after_one_limit_not_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticks come ten times in a limit, so that a call which begins just after one is seen for little more than that."""
    seen = []
    monkeypatch.setattr(
        "tokentwin.serving.user_code.call_limit.signal.setitimer", lambda which, first, then=0.0: seen.append(first)
    )
    with watching():
        limited(int)
    assert seen == [0.005, 0.0]


def test_all_calls_together_have_a_limit_too() -> None:
    calls = 0
    with (
        watching(),
        time_limit(0.01),
        pytest.raises(Fault, match=r"int\(\) was under way after 0.01 s, the limit of a"),
    ):
        while True:
            limited(int)
            calls += 1
    assert calls and limited(int) == 0


def test_what_catches_its_own_end_takes_the_process_along(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SWALLOWS)
    code = (
        "import tokentwin.serving.user_code.call_limit as c; c.CALL_LIMIT_S = 0.05; import sys; "
        "from tokentwin.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "policy", "check", f"{tmp_path}/mine.py:Mine"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "call: 'import()': catches what would end it" in done.stderr


# What it raises and returns may be anything


class Broken(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


def test_a_text_that_cannot_be_had_is_left_out() -> None:
    def fail() -> None:
        raise Broken

    with pytest.raises(Fault, match=r"raised Broken: \(its message cannot be read\) \(test_call_limit.py, line \d+\)"):
        limited(fail)
    assert shown(Broken()) == "a Broken that cannot be shown"
    assert str(UserError("policy", Broken(), "is odd")) == "policy: a Broken that cannot be shown: is odd"


def test_control_characters_reach_no_terminal() -> None:
    text = "a\x1b[2Jb\rc\x07\u202ed\x00"
    assert one_line(text) == "a\\x1b[2Jb c\\x07\\u202ed\\x00"
    assert "\x1b" not in raised(ValueError(text)) + str(UserError("policy", text, text)) + shown(text)
    assert one_line("ünïcode 東京 ✓") == "ünïcode 東京 ✓"
    assert len(raised(ValueError("x" * 10_000))) < 400
