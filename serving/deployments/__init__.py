"""Descriptions of deployments: engines, fleets, models and GPUs, and the number of KV blocks that follows from them."""
