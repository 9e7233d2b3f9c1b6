"""A user's own policies, routers and cost models: they are found by name, called with a time limit, and checked."""
