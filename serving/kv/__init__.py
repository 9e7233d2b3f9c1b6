"""KV memory: blocks with and without identities, the prefix cache, and KV outside an engine's blocks."""
