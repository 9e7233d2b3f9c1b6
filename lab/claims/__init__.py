"""Common claims about inference, as experiments that anyone can run."""
