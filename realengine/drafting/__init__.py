"""What proposes draft tokens on the real engine."""
