"""What the Policy lab asks, the inputs that ask it, and the jobs that answer; no figures."""
