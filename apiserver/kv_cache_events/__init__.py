"""Events about KV blocks in vLLM's format, and their publishers."""
