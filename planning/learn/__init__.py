"""A twin of a running server, learnt from its answers to designed questions."""
