"""The names of the attention backends, each with the `module:Class` that implements it.

This module imports nothing, so that a name can be checked without torch.
"""

ATTENTION = {
    "auto": "",  # triton on CUDA, torch on the CPU
    "torch": "tokentwin.realengine.attention.torch_attention:TorchAttention",
    "unfused": "tokentwin.realengine.attention.torch_attention:UnfusedAttention",  # scores in memory, as a baseline
    "triton": "tokentwin.realengine.attention.triton_attention:TritonAttention",
    "hybrid": "tokentwin.realengine.attention.triton_attention:HybridAttention",
    "varlen": "tokentwin.realengine.attention.flash_attention:VarlenAttention",
    "flash-attn": "tokentwin.realengine.attention.flash_attention:FlashAttention",
    "flashinfer": "tokentwin.realengine.attention.flashinfer_attention:FlashInferAttention",
}
LIBRARIES = ("varlen", "flash-attn", "flashinfer")
