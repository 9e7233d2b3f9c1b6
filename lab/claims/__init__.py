"""What everyone says about inference, as experiments that anyone can run."""
