"""Before anything imports numpy: the environment that the command line sets for itself; and shared fixtures."""

import signal

import tests.budget  # noqa: F401
import tokentwin  # noqa: F401
from tests.dashboard.browser import own_runs, own_server, page, server, server_runs, window  # noqa: F401
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
