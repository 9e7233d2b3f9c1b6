"""A user's own policies, routers and cost models: found by name, called with a limit, and trusted in nothing."""
