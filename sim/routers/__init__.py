"""Routers: how requests are spread over replicas, one idea a file."""
