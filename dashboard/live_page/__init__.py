"""The Live page: a server while it runs, and the journey of a prompt of one's own through it."""
