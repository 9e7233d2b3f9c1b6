"""What one deployment or policy does better than another, and what can be claimed of the difference."""
