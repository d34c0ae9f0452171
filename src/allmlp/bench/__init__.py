"""Benchmarks against other libraries: equal weights, interleaved rounds; a backend with other outputs is rejected."""
