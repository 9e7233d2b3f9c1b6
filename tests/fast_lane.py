"""The fast lane, `pytest --fast`: tests that are quick enough to run at every save.

It leaves out files that need torch, Streamlit, a browser or a server, whose start alone takes longer. It also leaves
out the tests in `slow_tests.txt`, which were measured to take more than `MOST_S` of CPU time. A new test is in the lane
until it is measured: `pytest --fast --measure tests/slow_tests.txt`.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tokentwin.serving.compiled_core import COMPILED_CORE, CORE

MOST_S = 0.05  # CPU seconds of a test, with its fixtures and processes, averaged over its parameters
SLOW = Path(__file__).with_name("slow_tests.txt")
_LONGEST = ("browser", "engine", "aot")  # marks of the slowest files, which run first
_HEAVY = re.compile(r"importorskip\(\"(torch|triton|streamlit)\"|tests\.(dashboard\.browser|apiserver\.served\w*) ")
_TOOK_S: dict[str, list[float]] = defaultdict(list)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only tests that take milliseconds, with few examples")
    parser.addoption("--measure", metavar="FILE", help="with --fast: run the slow ones, too, and list them in FILE")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fast"):
        settings.load_profile("fast")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    fast = config.getoption("--fast") and collection_path.name.startswith("test_")
    return True if fast and _HEAVY.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not any(map(item.get_closest_marker, _LONGEST)))
    for item in items if CORE == COMPILED_CORE else ():
        if item.get_closest_marker("pure"):
            item.add_marker(pytest.mark.skip("`make test-pure` runs it"))
    if not config.getoption("--fast") or config.getoption("--measure"):
        return
    slow = set(SLOW.read_text(encoding="utf-8").split())
    left_out = [item for item in items if _name(item) in slow]
    items[:] = [item for item in items if _name(item) not in slow]
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under `--dist loadfile`, send all browser tests to one worker, which starts the browser once."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "browser" if file.endswith("browser.py") else file

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    began = os.times()
    result = yield
    _TOOK_S[_name(item)].append(sum(os.times()[:4]) - sum(began[:4]))
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    if file := session.config.getoption("--measure"):
        slow = [name for name, took_s in _TOOK_S.items() if sum(took_s) > MOST_S * len(took_s)]
        Path(file).write_text("".join(f"{name}\n" for name in sorted(slow)), encoding="utf-8")


def _name(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
