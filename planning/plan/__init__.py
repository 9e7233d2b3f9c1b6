"""The cheapest fleet that meets its objectives: candidates, simulated fleets, bisection, and what follows from them.

Nothing here reads a file or prints; `tokentwin.commands.plan` does both.
"""
