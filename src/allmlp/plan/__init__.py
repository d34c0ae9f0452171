"""What a run past one machine takes: memory of a GPU, time of a step, traffic, object store, failures."""
