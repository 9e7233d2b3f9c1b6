"""Checks of users' policies and routers, and of our scheduler against vLLM's."""
