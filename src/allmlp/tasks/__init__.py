"""Tasks: what a loss is. The loop in `allmlp.train` runs any of them and knows none by name."""
