"""The parameter `kv_transfer_params` of vLLM's NIXL connector, with which a gateway splits prefill and decode."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, StrictBool

from apiserver.messages import About
from apiserver.openai_api.refusal import Refusal


class KvTransferParams(BaseModel):
    """The parameters that a gateway sends to the server that prefills, and then to the server that decodes.

    Attributes:
        do_remote_decode: compute the prompt; another server decodes
        do_remote_prefill: `remote_engine_id` has computed the prompt, and keeps its KV in `remote_block_ids`
    """

    model_config = ConfigDict(extra="allow")

    do_remote_decode: StrictBool = False
    do_remote_prefill: StrictBool = False
    remote_engine_id: str | None = None
    remote_block_ids: list[Any] | None = None

    def source(self, about: About, stream: bool) -> str:
        """Return the server that has the KV of the prompt; empty if this server must compute it.

        Raises Refusal for a request that a server of this role does not serve.
        """
        for asked, role in ((self.do_remote_decode, "prefill"), (self.do_remote_prefill, "decode")):
            if asked and about.role != role:
                raise Refusal(400, f"this server has the role {about.role}; ask one with --role {role}", _FIELD)
        if self.do_remote_decode and stream:
            raise Refusal(400, "an answer that is streamed cannot hand on KV; leave stream out", "stream")
        if self.do_remote_prefill and self.remote_block_ids and self.remote_engine_id:
            return self.remote_engine_id
        return ""

    def answer(self, about: About, id: str, prompt_tokens: int, host: str, port: int) -> dict[str, Any] | None:
        """Return the parameters for the server that decodes; None if no other server does."""
        if not self.do_remote_decode:
            return None
        blocks = -(-prompt_tokens // about.block_size)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, blocks + 1))],
            "remote_engine_id": f"{host}:{port}",
            "remote_request_id": id,
            "remote_host": host,
            "remote_port": port,
            "remote_num_tokens": prompt_tokens,
        }


_FIELD = "kv_transfer_params"
