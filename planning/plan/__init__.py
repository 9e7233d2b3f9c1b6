"""The cheapest fleet that meets its objectives: candidates, simulated fleets, bisection, and the answer.

Nothing here reads a file or prints; `tokentwin.commands.plan` does both.
"""
