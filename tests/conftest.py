"""Before anything imports numpy: the environment that the command line sets for itself."""

import tokentwin  # noqa: F401
