"""Routers, which spread requests over replicas. Each file implements one method."""
