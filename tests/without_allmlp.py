"""The beginning of a script that has transformers, and cannot import allmlp."""

PRELUDE = """
import sys, json, torch
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "allmlp":
            raise ModuleNotFoundError("no allmlp here")
sys.meta_path.insert(0, Blocked())
# torchvision's extension may not load here; these operators are all that importing it needs.
library = torch.library.Library("torchvision", "FRAGMENT")
if not hasattr(torch.ops.torchvision, "nms"):
    [library.define(f"{name}(Tensor a, Tensor b, float c) -> Tensor") for name in ("nms", "qnms")]
import transformers
"""
