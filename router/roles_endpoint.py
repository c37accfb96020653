"""`/v1/roles`: GET says what role each worker has and how far a change of it is, POST asks for a change.

Asking goes the way of `vllm-pd role`: a wish in the store that the worker's own agent carries out.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec

from vllm_pd import roles as moves
from vllm_pd.errors import SettingsError, StoreError
from vllm_pd.layered import nearest
from vllm_pd.roles import Asked, Verdict
from vllm_pd.router.directory import Directory
from vllm_pd.router.replies import send_error, send_json
from vllm_pd.router.settings import RouterSettings
from vllm_pd.router.transport import BodyError, ClientReply, ClientRequest
from vllm_pd.router.worker import Source, Worker
from vllm_pd.state.base import Registry, Role
from vllm_pd.state.roles import Roles

PATH = "/v1/roles"
AUTO = "auto"
MAX_BODY = 64 * 1024

_STATUS = {
    Verdict.ASKED: HTTPStatus.ACCEPTED,
    Verdict.ALREADY: HTTPStatus.OK,
    Verdict.UNKNOWN: HTTPStatus.NOT_FOUND,
    Verdict.HELD: HTTPStatus.CONFLICT,
    Verdict.DEPOSED: HTTPStatus.CONFLICT,
    Verdict.UNABLE: HTTPStatus.CONFLICT,
    Verdict.LAST: HTTPStatus.CONFLICT,
}
_EXAMPLE = '{"worker": "host:port", "role": "prefill"}'


class _Wanted(msgspec.Struct, forbid_unknown_fields=True):
    worker: str
    role: str
    timeout: float = 0.0
    force: bool = False
    wait: bool = False


_wanted = msgspec.json.Decoder(_Wanted)


class RolesEndpoint:
    """Belongs to one router.

    Args:
        registry, roles: those of the store; None where there is none.
    """

    def __init__(
        self, settings: RouterSettings, directory: Directory, registry: Registry | None, roles: Roles | None
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._registry = registry
        self._roles = roles

    async def serve(self, request: ClientRequest, reply: ClientReply) -> None:
        """Answer one request."""
        if request.method in ("GET", "HEAD"):
            workers = [_described(worker) for worker in self._directory.workers]
            await send_json(reply, 200, {"workers": workers, "moves_allowed": self._settings.allows_role_moves})
        elif request.method == "POST":
            await self._ask(request, reply)
        else:
            await send_error(reply, 405, f"{PATH} takes GET and POST requests only.", [("Allow", "GET, POST")])

    async def _ask(self, request: ClientRequest, reply: ClientReply) -> None:
        if not self._settings.allows_role_moves:
            problem = "This router does not let its clients change roles; see --role-moves, or use `vllm-pd role`."
            await send_error(reply, 403, problem)
            return
        if self._registry is None or self._roles is None:
            await send_error(reply, 503, "Roles change through the store, and this router has none; give it --store.")
            return
        try:
            body = await request.body(MAX_BODY, self._settings.idle_timeout)
            wanted = _wanted.decode(body)
            role = None if wanted.role == AUTO else Role(wanted.role)
        except BodyError as e:
            await send_error(reply, e.status, str(e), [("Connection", "close")])
            return
        except msgspec.MsgspecError as e:
            await send_error(reply, 400, f"The body must be like {_EXAMPLE}: {e}.")
            return
        except ValueError:
            known = [*Role, AUTO]
            hint = nearest(wanted.role, [str(each) for each in known])
            await send_error(reply, 400, f"The role must be one of {', '.join(known)}, got {wanted.role!r}{hint}.")
            return
        try:
            asked = await moves.request_move(
                self._registry, self._roles, wanted.worker, role, timeout_s=wanted.timeout, force=wanted.force
            )
        except SettingsError as e:
            await send_error(reply, 400, str(e))
            return
        except StoreError as e:
            await send_error(reply, 503, f"The store does not answer, so whether it was asked is not known: {e}")
            return
        if not asked.ok:
            await send_error(reply, int(_STATUS[asked.verdict]), asked.detail)
        elif wanted.wait and asked.wish is not None and asked.record is not None:
            moved = await moves.wait_for_move(self._registry, asked.record, asked.wish)
            value = {**_answer(asked), "done": moved.done, "detail": moved.detail, "move": moved.move}
            await send_json(reply, 200 if moved.done else 409, value)
        else:
            await send_json(reply, int(_STATUS[asked.verdict]), _answer(asked))


def _answer(asked: Asked) -> dict[str, Any]:
    return {
        "verdict": asked.verdict,
        "detail": asked.detail,
        "worker": asked.record.id if asked.record is not None else None,
        "wish": asked.wish.id if asked.wish is not None else None,
    }


def _described(worker: Worker) -> dict[str, Any]:
    record = worker.record
    return {
        "worker": worker.id,
        "url": worker.url,
        "pool": worker.pool,
        "role": record.role,
        "role_epoch": record.role_epoch,
        "moving_to": record.moving_to,
        "held": moves.is_held(record),
        "can_move": worker.source is Source.STORE,
        "move": record.move,
    }
