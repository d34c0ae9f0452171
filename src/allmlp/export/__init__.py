"""A trained model as a file for another runtime: torch.export, ONNX, AOTInductor."""
