"""A user's code that does anything but return, wherever it is called, ends in a one-line error."""

import subprocess
import sys
from pathlib import Path

import pytest

from tokentwin.serving.errors import UserError, one_line, raised, shown
from tokentwin.serving.user_code.call_limit import Fault, limited
from tokentwin.sim.checks.policy_check import check_policy, check_policy_apart

CODE = """
import os, threading, time
from concurrent.futures import ThreadPoolExecutor
from tokentwin.serving.policies.vllm import VllmScheduler

class Loops(VllmScheduler):
    def schedule(self):
        while True: pass

class Made(VllmScheduler):
    def __init__(self, config, **engine):
        super().__init__(config, **engine)
        time.sleep(1e6)

class Swallows(VllmScheduler):
    def schedule(self):
        while True:
            try: time.sleep(1e6)
            except BaseException: pass

class Threads(VllmScheduler):
    def schedule(self):
        threading.Thread(target=time.sleep, args=(1e6,), name="mine").start()
        return super().schedule()

class Pools(VllmScheduler):
    def __init__(self, config, **engine):
        super().__init__(config, **engine)
        self.workers = ThreadPoolExecutor(1, "mine")
        self.workers.submit(time.sleep, 1e6)

class Tidy(VllmScheduler):
    def schedule(self):
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        return super().schedule()

class Exits(VllmScheduler):
    def schedule(self):
        os._exit(7)

def endless(plan):
    while True: pass
"""
SHORT = "import tokentwin.serving.user_code.call_limit as c; c.CALL_LIMIT_S = 0.3; c.GRACE_S = 0.2; c._LONGER = 2; "
LIMIT = "the limit of one call"


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(CODE)
    (folder / "t.jsonl").write_text('{"arrival_s": 0, "prompt_tokens": 40, "output_tokens": 9}\n' * 8)
    (folder / "d.yaml").write_text("scheduler: {num_blocks: 200}")
    code = f"{SHORT}import sys; from tokentwin.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("policy", "cost", "says"),
    [
        ("mine.py:Loops", "", f"mine.py:Loops': step 0: schedule() has not returned after 0.3 s, {LIMIT}"),
        ("mine.py:Made", "", f"mine.py:Made': cannot be made: Made() has not returned after 0.6 s, {LIMIT}"),
        ("mine.py:Swallows", "", f"call: 'schedule()': has not returned after 0.3 s, {LIMIT}"),
        ("mine.py:Threads", "", "thread: 'mine and "),
        ("mine.py:Pools", "", "thread: 'mine_0': of your code does not end; join it, or make it a daemon"),
        ("vllm", "mine.py:endless", "step_ns endless() has not returned after 0.3 s"),
        ("mine.py:Tidy", "", ""),
    ],
)
def test_what_never_ends_ends_a_command_in_one_line(policy: str, cost: str, says: str, tmp_path: Path) -> None:
    timed = ("--calibration", cost, "-d", "d.yaml") if cost else ("--gpu", "H100")
    done = command(tmp_path, "simulate", "t.jsonl", *timed, "--no-band", "--policy", policy, "-o", "run")
    assert done.returncode == (2 if says else 0), done
    assert says in done.stderr and done.stderr.count("\n") == bool(says), done
    left = {path.name for path in (tmp_path / "run").glob("*.parquet")}
    assert bool(left) == (not says or "thread:" in says)  # a run that ended is kept, of another nothing is


@pytest.mark.parametrize(
    ("name", "limit_s", "says"),
    [
        ("Swallows", 2.0, "is under way after 2 s, the limit of the whole check"),
        ("Threads", 60.0, "starts threads that do not end: mine and "),
        ("Exits", 60.0, "ends the process in which it is checked"),
    ],
)
def test_a_check_of_what_never_ends_ends(name: str, limit_s: float, says: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    checked = check_policy_apart(f"{tmp_path}/mine.py:{name}", limit_s)
    (broken,) = checked.findings
    assert not checked.holds and broken.rule == "time" and says in broken.broken["plain"]


def test_a_check_in_a_process_of_its_own_finds_the_same() -> None:
    assert check_policy_apart("vllm", 60.0) == check_policy("vllm")
    with pytest.raises(UserError, match="must be vllm, static"):
        check_policy_apart("nobody", 60.0)


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
