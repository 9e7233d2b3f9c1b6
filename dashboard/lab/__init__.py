"""What the Policy lab asks, and the jobs that answer it; nothing here draws."""
