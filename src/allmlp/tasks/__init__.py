"""Tasks: losses and metrics. The loop in `allmlp.training` runs any of them."""
