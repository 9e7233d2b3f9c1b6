"""A tiny model that hears, Qwen2-Audio, with the files of its processor; a sound of 0.2 to 16 s has 5 to 400 tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.vllm.tiny_model import TINY

SOUND_TOKEN = TINY["vocab_size"] - 1  # its placeholder in a prompt
_NAMES = {SOUND_TOKEN - 2: "<|audio_eos|>", SOUND_TOKEN - 1: "<|audio_bos|>", SOUND_TOKEN: "<|AUDIO|>"}
_RATE = 16_000  # samples per second
_SECONDS = 30  # of the longest sound; vLLM's model accepts no other number
_ENCODER = {
    "model_type": "qwen2_audio_encoder", "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128, "num_mel_bins": 16, "max_source_positions": 50 * _SECONDS,
}  # fmt: skip
AUDIO = {
    "architectures": ["Qwen2AudioForConditionalGeneration"], "model_type": "qwen2_audio", "audio_config": _ENCODER,
    "text_config": {**TINY, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "audio_token_index": SOUND_TOKEN, "vocab_size": TINY["vocab_size"],
}  # fmt: skip
_EXTRACTOR = {
    "feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "Qwen2AudioProcessor", "feature_size": 16,
    "sampling_rate": _RATE, "hop_length": 160, "chunk_length": _SECONDS, "n_fft": 400, "padding_value": 0.0,
}  # fmt: skip
_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "pad_token": "w0", "bos_token": "w1",
    "eos_token": "w2",
}  # fmt: skip


def save_processor(folder: Path) -> None:
    """Write the files of the processor of sounds and text."""
    (folder / "preprocessor_config.json").write_text(json.dumps(_EXTRACTOR))
    save_tokenizer(folder)


def save_tokenizer(folder: Path, names: dict[int, str] = _NAMES, processor: str = "Qwen2AudioProcessor") -> None:
    """Write the files of a tokenizer with a word for each token; `names` are those of special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    (folder / "tokenizer_config.json").write_text(json.dumps({**_TOKENIZER, "processor_class": processor}))
    words = {names.get(number, f"w{number}"): number for number in range(TINY["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(names.values()))
    tokenizer.save(str(folder / "tokenizer.json"))


def sound(number: int) -> tuple[Any, int]:
    """Return sound `number`, whose length depends on it, too, and its samples per second."""
    drawn = np.random.default_rng(number)
    return drawn.normal(size=int(drawn.uniform(0.2, 16) * _RATE)).astype("float32"), _RATE
