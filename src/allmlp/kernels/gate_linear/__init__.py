"""The spatial gate and the linear map after it: `reference` is the definition, `triton` the kernel."""
