"""The wall clock: a real LLM engine on torch, driven by the shared scheduler.

Paged KV cache, continuous batching, chunked prefill, prefix reuse and preemption as the scheduler decides.
Never imports simpy or the simulator.
"""
