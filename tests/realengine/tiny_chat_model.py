"""A tiny random Llama that reads and writes text: a token a printable character, and a chat template."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Built

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>")
POSITIONS = 4096
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"


def save_tokenizer(folder: Path) -> Path:
    """Write a tokenizer's files, which transformers can read, too."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = [split.pre_tokenize_str(character)[0][0] for character in CHARACTERS]
    built = Built(models.BPE(vocab={letter: id for id, letter in enumerate(letters)}, merges=[]))
    built.pre_tokenizer, built.decoder = split, decoders.ByteLevel()
    built.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    built.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[1], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def save_chat_model(folder: Path) -> Any:
    """Save the model into `folder`, and return transformers' model. Its likeliest token is always text."""
    import torch

    from tests.realengine.tiny_models import save

    text = len(CHARACTERS)
    shape = {"vocab_size": text + len(SPECIAL), "max_position_embeddings": POSITIONS, "eos_token_id": text + 1}
    model = save("llama", save_tokenizer(folder), shape)
    with torch.no_grad():
        model.lm_head.weight[text:] = 0
    model.save_pretrained(folder)
    return model
