"""The search for the cheapest fleet that meets its objectives: candidates, simulated fleets, bisection, and the answer.

Nothing here prints; `tokentwin.commands.plan` does.
"""
