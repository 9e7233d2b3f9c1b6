"""The field `kv_transfer_params` of vLLM's NIXL connector, by which a gateway separates prefill and decode."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, StrictBool

from tokentwin.apiserver.messages import About
from tokentwin.apiserver.openai_api.refusal import Refusal


class KvTransferParams(BaseModel):
    """The parameters that a gateway sends first to the prefill server and then to the decode server.

    Attributes:
        do_remote_decode: True if this server computes the prompt and another server decodes
        do_remote_prefill: True if the server `remote_engine_id` has computed the prompt and has its KV in the blocks
            `remote_block_ids`
    """

    model_config = ConfigDict(extra="ignore")  # connectors have fields of their own; they are not kept

    do_remote_decode: StrictBool = False
    do_remote_prefill: StrictBool = False
    remote_engine_id: str | None = None
    remote_block_ids: list[Any] | None = None

    def source(self, about: About, stream: bool) -> str:
        """Return the server that has the KV of the prompt; empty if this server must compute it.

        Raises Refusal if a server of this role does not serve such a request.
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
        """Return the parameters to send to the decode server; None if this server decodes."""
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
