"""What both clocks share: requests, KV blocks, scheduling policies, specs and the metric registry.

Pure Python: never imports torch, simpy, or any other package of this project.
"""
