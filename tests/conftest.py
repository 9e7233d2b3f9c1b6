"""Before anything imports numpy: the environment that the command line sets for itself; and shared fixtures."""

import asyncio
import gc
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

# Workers share two cores: threads of torch that wait for one another would take them from the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import tests.budget  # noqa: F401
import tokentwin  # noqa: F401
from tests.dashboard.browser import page, server, server_runs, window  # noqa: F401
from tests.fast_lane import (  # noqa: F401
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_ignore_collect,
    pytest_runtest_protocol,
    pytest_sessionfinish,
    pytest_xdist_make_scheduler,
)

# A shell lets what it starts in the background ignore Ctrl-C, children and all; the tests of Ctrl-C need it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What is imported by now stays. A search for reference cycles would look through all of it: a third of a second,
    and Streamlit makes one after every drawing of a page."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Else nanobind calls what is frozen a leak, on sixty lines."""
    gc.unfreeze()


@contextmanager
def _no_running_loop(item: pytest.Item) -> Iterator[None]:
    """Playwright leaves its loop marked as running while the browser is open, and no other could be run."""
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
