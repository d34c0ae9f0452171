"""Fuzzers of everything that reads what a user gives: `make fuzz MINUTES=2 SEED=0`. See `fuzz.targets`."""
