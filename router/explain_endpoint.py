"""`POST /v1/explain`: where a request would go now, and why. Nothing is sent on."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import msgspec

from vllm_pd.router.call import CallReader, Endpoint, nothing_decodes
from vllm_pd.router.directory import Directory
from vllm_pd.router.placement import Placer
from vllm_pd.router.replies import send_error
from vllm_pd.router.transport import ClientReply, ClientRequest

PATH = "/v1/explain"


class ExplainEndpoint:
    """Takes the body of an inference request. `?path=/v1/completions` says of which endpoint, else its fields do."""

    def __init__(self, directory: Directory, calls: CallReader, placer: Placer, inference: dict[str, Endpoint]) -> None:
        self._directory = directory
        self._calls = calls
        self._placer = placer
        self._inference = inference

    async def serve(self, request: ClientRequest, reply: ClientReply) -> None:
        """Answer with the record of the decision, which `vllm-pd explain` reads."""
        path = parse_qs(urlsplit(request.target).query).get("path", [""])[0]
        endpoint = self._inference.get(path)
        if path and endpoint is None:
            await send_error(reply, 400, f"path must be one of {', '.join(self._inference)}, got {path!r}.")
            return
        call = await self._calls.read(endpoint, request, reply)
        if call is None:
            return
        call.demand.explain = True
        placement = self._placer.place(call.demand, call.workers, split=True, sends=False)
        if placement is None:
            await send_error(reply, 503, nothing_decodes(self._directory, call.demand.model))
            return
        assert placement.record is not None, "an explanation was asked for"
        body = msgspec.json.format(msgspec.json.encode(placement.record), indent=1)
        await reply.send(200, [("Content-Type", "application/json")], body)
