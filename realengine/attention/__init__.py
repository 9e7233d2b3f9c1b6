"""The names of the attention backends, each with the `module:Class` that implements it.

This module imports nothing, so that a name can be checked without torch.
"""

ATTENTION = {
    "auto": "",  # triton on CUDA, torch on the CPU
    "torch": "realengine.attention.torch_attention:TorchAttention",
    "unfused": "realengine.attention.torch_attention:UnfusedAttention",  # scores in memory, as a baseline
    "triton": "realengine.attention.triton_attention:TritonAttention",
    "hybrid": "realengine.attention.triton_attention:HybridAttention",
    "varlen": "realengine.attention.flash_attention:VarlenAttention",
    "flash-attn": "realengine.attention.flash_attention:FlashAttention",
    "flashinfer": "realengine.attention.flashinfer_attention:FlashInferAttention",
}
LIBRARIES = ("varlen", "flash-attn", "flashinfer")
