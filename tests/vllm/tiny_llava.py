"""A tiny model that reads images, LLaVA-NeXT, with the files of its processor; an image has 20 to 72 tokens."""

import json
from pathlib import Path
from random import Random
from typing import Any

from tests.vllm.tiny_model import TINY

IMAGE_TOKEN = TINY["vocab_size"] - 1  # its placeholder in a prompt
_GRID = [[56, 112], [112, 56], [112, 112]]
_VISION = {
    "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 56, "patch_size": 14, "projection_dim": 64, "num_channels": 3,
}  # fmt: skip
LLAVA = {
    "architectures": ["LlavaNextForConditionalGeneration"], "model_type": "llava_next", "text_config": TINY,
    "vision_config": _VISION, "image_token_index": IMAGE_TOKEN, "image_grid_pinpoints": _GRID,
    "projector_hidden_act": "gelu", "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
}  # fmt: skip
_IMAGES = {
    "image_processor_type": "LlavaNextImageProcessor", "processor_class": "LlavaNextProcessor",
    "crop_size": {"height": 56, "width": 56}, "size": {"shortest_edge": 56}, "image_grid_pinpoints": _GRID,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.3, 0.3, 0.3],
}  # fmt: skip
_PROCESSOR = {
    "processor_class": "LlavaNextProcessor", "patch_size": 14, "vision_feature_select_strategy": "default",
    "image_token": "<image>", "num_additional_image_tokens": 1,
}  # fmt: skip
_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "pad_token": "w0", "bos_token": "w1",
    "eos_token": "w2", "extra_special_tokens": {"image_token": "<image>"}, "image_token": "<image>",
}  # fmt: skip


def save_processor(folder: Path) -> None:
    """Write the files of the processor of images and text."""
    for name, config in {"preprocessor": _IMAGES, "processor": _PROCESSOR}.items():
        (folder / f"{name}_config.json").write_text(json.dumps(config))
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    """Write the files of a tokenizer with a word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    (folder / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER))
    words = {f"w{number}": number for number in range(IMAGE_TOKEN)} | {"<image>": IMAGE_TOKEN}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def picture(number: int) -> Any:
    """Return picture `number`, whose size depends on it, too."""
    from PIL import Image

    chance = Random(number)
    size = (chance.choice([40, 56, 100, 150]), chance.choice([40, 56, 100, 150]))
    return Image.frombytes("RGB", size, chance.randbytes(3 * size[0] * size[1]))
