"""The wall clock: a real LLM engine on torch, driven by the shared scheduler.

It has a paged KV cache, continuous batching, chunked prefill, prefix reuse and preemption, as the scheduler decides. It
never imports simpy or the simulator.
"""
