"""The modules that both clocks share: requests, KV blocks, scheduling policies, specs and the metric registry.

Pure Python: this package never imports torch, simpy, or any other package of this project.
"""

import tokentwin.serving.compiled_core  # noqa: F401  # decides which other modules are compiled
