"""Let torchvision be imported beside vLLM's torch for CPUs: run once, by `make vllm`.

The wheel's compiled operators need a torch for GPUs, and two of them are looked up on import. No processor of pictures
uses them, so it is enough that torchvision declares them itself.
"""

import importlib.util
from pathlib import Path

_DECLARED = """import torch

_operators = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")

"""

spec = importlib.util.find_spec("torchvision")
if spec is None or spec.origin is None:
    raise SystemExit("torchvision is not installed")
file = Path(spec.origin)
if not file.read_text().startswith(_DECLARED):
    file.write_text(_DECLARED + file.read_text())
