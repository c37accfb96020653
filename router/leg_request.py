"""What a worker is sent for one leg: the body with its turn or its transfer parameters, and the headers."""

from __future__ import annotations

import time

from vllm_pd.router.attempt import Attempt, Placed
from vllm_pd.router.call import Call
from vllm_pd.router.continuable import asking_ids
from vllm_pd.router.decision import Reason
from vllm_pd.router.headers import RANK_HEADER, to_worker
from vllm_pd.router.legs import PRIORITY_HEADER, combined_priority, decode_body, own_priority, prioritised_body
from vllm_pd.router.settings import RouterSettings
from vllm_pd.router.transport import Headers, header


def names_rank(call: Call) -> bool:
    """Whether the client has named an engine itself."""
    return header(call.request.headers, RANK_HEADER.lower()) is not None


def own_authorization(settings: RouterSettings, call: Call) -> str:
    """The client's `Authorization` where workers check it themselves, else empty."""
    return "" if settings.worker_api_key else header(call.request.headers, "authorization") or ""


def leg_headers(settings: RouterSettings, call: Call, placed: Placed, request_id: str | None) -> Headers:
    """The client's headers as the worker gets them, with the rank of the chosen engine."""
    headers = to_worker(call.request.headers, worker_key=settings.worker_api_key, request_id=request_id)
    if placed.worker.record.dp_size > 1 and not names_rank(call):
        headers.append((RANK_HEADER, str(placed.engine.holder.rank)))
    return headers


def decode_request(settings: RouterSettings, attempt: Attempt, call: Call) -> tuple[bytes, Headers]:
    """Body and headers of the decode leg, or of a whole request."""
    headers = leg_headers(settings, call, attempt.placed, call.request_id)
    body = call.body
    if call.tail is not None:
        # What is compressed cannot be read on its way.
        headers = [pair for pair in headers if pair[0].lower() != "accept-encoding"]
        body = asking_ids(body)
    if attempt.remote and call.params is not None:
        return decode_body(body, call.params), headers
    return with_turn(body, headers, attempt, call)


def order_of(headers: Headers, attempt: Attempt, call: Call) -> int:
    """Where the prompt stands in a queue, the smallest first: the very number that `with_turn` tells the engine."""
    fields = call.demand.fields
    own = own_priority(fields.priority, header(headers, PRIORITY_HEADER)) if fields is not None else 0
    turn = attempt.turn if attempt.turn is not None else round(time.time() * 1000)
    return combined_priority(own, turn) or turn


def with_turn(body: bytes, headers: Headers, attempt: Attempt, call: Call) -> tuple[bytes, Headers]:
    """What is sent, with the turn of its prompt where the engine is to be told.

    A body without a prompt is refused anyway.
    """
    fields = call.demand.fields
    if attempt.turn is None or fields is None or call.demand.forbidden is Reason.NO_PROMPT:
        return body, headers
    told = prioritised_body(body, own_priority(fields.priority, header(headers, PRIORITY_HEADER)), attempt.turn)
    if told is not body:
        headers = [pair for pair in headers if pair[0].lower() != PRIORITY_HEADER]
    return told, headers
