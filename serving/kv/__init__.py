"""KV memory: blocks with and without identities, the prefix cache, and KV that lies outside an engine."""
