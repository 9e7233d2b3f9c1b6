"""Descriptions of what is deployed: engines, fleets, models and GPUs, and the KV blocks that follow from them."""
