"""A tiny model that sees, Qwen2-VL, with the files of its processor; a picture has 4 to 256 tokens, by its size."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.vllm.tiny_audio import save_tokenizer
from tests.vllm.tiny_model import TINY

_FIRST = TINY["vocab_size"] - 4
_NAMES = dict(enumerate(("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"), _FIRST))
PICTURE = [_FIRST, _FIRST + 1, _FIRST + 2]  # the placeholder in a prompt: the pad becomes as many as there are tokens
_SIDE = 28  # pixels of a token's side: two patches
_TOWER = {
    "model_type": "qwen2_vl", "depth": 2, "embed_dim": 64, "num_heads": 2, "hidden_size": TINY["hidden_size"],
    "mlp_ratio": 2, "patch_size": _SIDE // 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
}  # fmt: skip
PICTURES = {
    "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "vision_config": _TOWER,
    "vision_start_token_id": _FIRST, "image_token_id": _FIRST + 1, "vision_end_token_id": _FIRST + 2,
    "video_token_id": _FIRST + 3, "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
}  # fmt: skip
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor", "patch_size": _SIDE // 2,
    "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 4 * _SIDE**2, "max_pixels": 256 * _SIDE**2,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


def save_processor(folder: Path) -> None:
    """Write the files of the processor of pictures and text."""
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    save_tokenizer(folder, _NAMES, "Qwen2VLProcessor")


def picture(number: int) -> Any:
    """Return picture `number`, whose size depends on it, too."""
    from PIL import Image

    drawn = np.random.default_rng(number)
    width, height = (_SIDE * drawn.integers(2, 17, 2)).tolist()
    return Image.fromarray(drawn.integers(0, 255, (height, width, 3), dtype=np.uint8))
