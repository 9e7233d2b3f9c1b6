"""Models: the sources of their weights, the layouts of stored weights, and the computation of a step."""
