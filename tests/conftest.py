"""The environment that the command line sets for itself, set before anything imports numpy; and shared fixtures."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# Workers share two cores: torch's threads would wait for one another, and take the cores from other workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import tests.budget  # noqa: F401
import tokentwin  # noqa: F401
from tests.dashboard.browser import page, server, server_runs, skipped_without_it, window  # noqa: F401
from tests.fast_lane import (  # noqa: F401
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_ignore_collect,
    pytest_runtest_protocol,
    pytest_sessionfinish,
    pytest_xdist_make_scheduler,
)


class _OneName:
    """A finder that knows no package of ours but `tokentwin`: the others lie in the working directory of the tests."""

    def find_spec(self, name: str, *_: object) -> None:
        if "." not in name and (ROOT / "tokentwin" / name).is_symlink():
            raise ModuleNotFoundError(f"{name} is tokentwin.{name}", name=name)


ROOT = Path(__file__).parents[1]
sys.meta_path.insert(0, _OneName())  # type: ignore[arg-type]

# A shell starts background processes so that they and their children ignore Ctrl-C; the tests of Ctrl-C need it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Exempt all objects that exist by now from garbage collection.

    A collection over them takes a third of a second, and Streamlit starts one after every drawing of a page.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the exemption, or nanobind would report the exempt objects as leaks, on sixty lines.

    The last line of all says whether the browser tests were skipped.
    """
    gc.unfreeze()
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter and not hasattr(config, "workerinput") and (line := skipped_without_it(reporter.getreports("skipped"))):
        reporter.write_line(line, yellow=True)


@contextmanager
def _no_running_loop(item: pytest.Item) -> Iterator[None]:
    """Hide Playwright's event loop, which stays marked as running while the browser is open and forbids any other."""
    if "browser" in item.keywords:
        yield
        return
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(running)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    with _no_running_loop(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with _no_running_loop(item):
        return (yield)
