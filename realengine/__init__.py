"""A real LLM engine on torch, which runs in real time and is driven by the shared scheduler.

It has a paged KV cache. The scheduler decides on continuous batching, chunked prefill, prefix reuse and preemption. It
never imports simpy or the simulator.
"""
