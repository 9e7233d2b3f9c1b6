"""The schedulers of installed engines as oracles: random scenarios, decided by them and by ours."""
