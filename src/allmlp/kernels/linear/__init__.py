"""A linear map over channels with activation, residual or statistics in the same pass, in 16 or 8 bits."""
