"""Before anything imports numpy: the environment that the command line sets for itself; and shared fixtures."""

import signal

import tokentwin  # noqa: F401
from tests.dashboard_browser import browser, server, server_runs  # noqa: F401

# A shell lets what it starts in the background ignore Ctrl-C, children and all; the tests of Ctrl-C need it.
signal.signal(signal.SIGINT, signal.default_int_handler)
