"""Before anything imports numpy: the environment that the command line sets for itself; and shared fixtures."""

import tokentwin  # noqa: F401
from tests.dashboard_browser import browser, server  # noqa: F401
