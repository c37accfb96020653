"""A request that was accepted: its bytes, what it asks for, and the workers that may serve it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from vllm_pd.router.attempt import Attempt
from vllm_pd.router.client_transfer import ClientTransfer, own_transfer, own_transfer_in
from vllm_pd.router.continuable import read_body, wants_ids, why_not
from vllm_pd.router.decision import PromptKind, Reason
from vllm_pd.router.demand import BadOverride, Demand, DemandReader
from vllm_pd.router.demand_report import Served
from vllm_pd.router.directory import Directory
from vllm_pd.router.give_up import Handed
from vllm_pd.router.prompt_reading import PromptReader
from vllm_pd.router.replies import send_error
from vllm_pd.router.request_fields import read_fields, read_model
from vllm_pd.router.settings import RouterSettings
from vllm_pd.router.token_tail import TokenTail
from vllm_pd.router.transport import BodyError, ClientReply, ClientRequest, Headers
from vllm_pd.router.worker import Worker
from vllm_pd.state.base import PoolId, WorkerId

MAX_NAMED_ID = 256


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path of the allow list; `kind` is None where requests always go whole."""

    path: str
    kind: PromptKind | None = None


CHAT = Endpoint("/v1/chat/completions", PromptKind.CHAT)
COMPLETION = Endpoint("/v1/completions", PromptKind.COMPLETION)


@dataclass(frozen=True, slots=True)
class Broken:
    """A stream that its worker broke off. It stands open."""

    worker: Worker
    problem: str
    """In one sentence."""
    at: float
    """When it was noticed, `time.monotonic()`."""
    stopping: bool = False
    """Not the worker broke it off but this router, which is being stopped."""
    handed_over: bool = False
    """Not the worker broke it off but this router, because the worker is to do something else."""


@dataclass(slots=True)
class Call:
    """A request on its way."""

    request: ClientRequest
    reply: ClientReply
    body: bytes
    workers: Sequence[Worker]
    demand: Demand
    request_id: str | None
    """For `X-Request-Id` where the client named none; None when the client named one, in a header or in the body."""
    started: float
    ready: float
    extra: Headers = field(default_factory=list)
    """Headers that the answer gets from the router."""
    decided: float = 0.0
    ttft: float = 0.0
    """Predicted seconds from `decided` to the first token."""
    prefill_took: float = 0.0
    params: bytes | None = None
    """Hand-off parameters as raw JSON, as long as a decode worker may read by them."""
    prefilled_on: WorkerId | None = None
    prefilled_pool: PoolId | None = None
    handed: Handed | None = None
    """The hand-off parameters that a decode worker may have got: from then on the blocks are its to release."""
    reserved: Attempt | None = None
    """The decode leg that was planned, counted on its engine and not sent yet."""
    tried: set[WorkerId] = field(default_factory=set)
    """Not to be asked again for this request."""
    reconnected: set[WorkerId] = field(default_factory=set)
    """Lost the connection once."""
    failed_inside: bool = False
    """A worker has answered it with status 500."""
    tail: TokenTail | None = None
    """What is kept of a stream that another worker could continue."""
    why_no_tail: str = ""
    """Which property of the request forbids that."""
    continues: int = 0
    """The how manieth continuation of a client's stream it is."""
    losses: int = 0
    """How many of the stream's workers were lost; those that it was taken from for another reason do not count."""
    limit: int = 0
    """Tokens that the whole answer may have, where this continues one."""
    next_look: float = 0.0
    """When it may be looked at again whether another worker can go on with its stream, `time.monotonic()`."""
    stays: bool = False
    """It was found to be none that another worker could go on with exactly."""
    broken: Broken | None = None
    served: Served | None = None
    """What is counted of it for planners; of a continuation that of the client's request."""

    @property
    def id(self) -> str:
        return self.demand.request


def _new_id() -> str:
    """128 random bits as hex. Names need to differ, not to be secret: no system call."""
    return f"{random.getrandbits(128):032x}"


def _for_header(name: str | None) -> str | None:
    """`name` if it can stand in a header."""
    return name if name and len(name) <= MAX_NAMED_ID and name.isascii() and name.isprintable() else None


def _endpoint_of(body: bytes) -> Endpoint:
    fields = read_fields(body)
    return CHAT if fields is not None and fields.messages is not UNSET else COMPLETION


class CallReader:
    """Reads requests as far as all need it, whatever becomes of them."""

    def __init__(self, settings: RouterSettings, directory: Directory, prompts: PromptReader) -> None:
        self._settings = settings
        self._directory = directory
        self._prompts = prompts
        self._demands = DemandReader(settings)

    async def read(self, endpoint: Endpoint | None, request: ClientRequest, reply: ClientReply) -> Call | None:
        """The call; None when it cannot be served and was answered here. Without an endpoint the body tells it."""
        started = time.monotonic()
        try:
            body = await request.body(self._settings.max_body_bytes, self._settings.idle_timeout)
        except BodyError as e:
            await send_error(reply, e.status, str(e), [("Connection", "close")])
            return None
        ready = time.monotonic()
        if endpoint is None:
            endpoint = _endpoint_of(body)
        fields = read_fields(body) if endpoint.kind is not None else None
        if self._settings.client_transfer_params == ClientTransfer.REFUSE:
            # What was read need not be searched.
            problem = own_transfer_in(fields) if fields is not None else own_transfer(body)
            if problem:
                await send_error(reply, 400, problem)
                return None
        model = fields.model if fields is not None else read_model(body)
        workers = self._directory.serving(model)
        if workers is None:
            named = f"The model {model!r} does not exist" if model else "The request names no model"
            known = ", ".join(self._directory.models)
            await send_error(reply, 404, f"{named}; workers of this router serve {known}.")
            return None
        if not any(worker.role.decodes for worker in workers):
            await send_error(reply, 503, nothing_decodes(self._directory, model))
            return None
        headers = {name.lower(): value for name, value in reversed(request.headers)}
        own_id = headers.get("x-request-id")
        in_body = fields.request_id if fields is not None else None
        name = own_id or _for_header(in_body) or _new_id()
        try:
            demand = self._demands.read(name, endpoint.path, model, endpoint.kind, fields, headers)
        except BadOverride as e:
            await send_error(reply, 400, str(e))
            return None
        await self._prompts.read(demand, len(body), workers)
        call = Call(request, reply, body, workers, demand, None if own_id or in_body else name, started, ready)
        if self._settings.continue_streams and endpoint.kind is not None and fields is not None and fields.stream:
            members = read_body(body)
            call.why_no_tail = why_not(members, endpoint.kind)
            if members is not None and not call.why_no_tail:
                call.tail = TokenTail(chat=endpoint.kind is PromptKind.CHAT, shows_ids=wants_ids(members))
        return call


def nothing_decodes(directory: Directory, model: str | None) -> str:
    """Why no worker can answer, in one sentence."""
    return directory.missing() or (
        f"No worker that decodes is alive for the model {model!r}; start one with --role decode or --role both."
    )


def nothing_prefills(model: str | None, reason: Reason) -> str:
    """Why a strict router refuses a request that no worker could prefill for another, in one sentence."""
    if reason is Reason.NO_TRANSFER:
        why = "The prefill workers or the decode worker cannot hand KV over (NIXL is off there); switch it on"
    else:
        why = "No worker prefills for others; start one with --role prefill or --role both"
    named = f" for the model {model!r}" if model else ""
    return f"{why}{named}, or run the router without --require-prefill."
