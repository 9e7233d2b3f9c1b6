"""Routers, which spread requests over replicas, one idea a file."""
