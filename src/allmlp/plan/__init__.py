"""Estimate what a large training run takes: GPU memory, step time, communication, storage, failures."""
