"""A linear map over channels fused with activation, residual or LayerNorm statistics, in 16-bit or fp8."""
