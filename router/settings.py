"""Settings of the router: flag > environment > file > default, in one frozen dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_pd import layered, parsers
from vllm_pd.errors import SettingsError
from vllm_pd.layered import Resolved, setting
from vllm_pd.router import setting_parsers
from vllm_pd.router.client_transfer import ClientTransfer
from vllm_pd.router.static_probe import StaticWorker
from vllm_pd.routing import policies
from vllm_pd.routing.policies import DEFAULT_POLICY, POLICIES
from vllm_pd.routing.split_rule import Disagg, SplitRule, split_rule

MIB = 1 << 20

_seconds = layered.number(0, exclusive=True, high=86400)


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Everything the router is told. Times are seconds."""

    host: str = setting(
        help="address to listen on; 0.0.0.0 for every interface",
        env="VLLM_PD_ROUTER_HOST",
        flag="--host",
        parse=layered.text,
        default="127.0.0.1",
    )
    port: int = setting(
        help="port to listen on; 0 picks a free one",
        env="VLLM_PD_ROUTER_PORT",
        flag="--port",
        parse=layered.integer(0, 65535),
        default=8080,
    )
    store: str = setting(
        help="URL of the Redis-compatible store where workers register",
        env="VLLM_PD_STORE",
        flag="--store",
        parse=parsers.store_url,
        default="",
    )
    namespace: str = setting(
        help="name that separates clusters sharing one store",
        env="VLLM_PD_NAMESPACE",
        flag="--namespace",
        parse=parsers.namespace,
        default="default",
    )
    workers: tuple[StaticWorker, ...] = setting(
        help="a worker known without a store, as URL=prefill, URL=decode or URL=both; repeat for more",
        env="VLLM_PD_ROUTER_WORKERS",
        flag="--worker",
        parse=setting_parsers.static_workers,
        default=(),
    )
    policy: str = setting(
        help=f"how a worker is chosen: {', '.join(POLICIES)}",
        env="VLLM_PD_ROUTER_POLICY",
        flag="--policy",
        parse=layered.choice(*POLICIES),
        default=DEFAULT_POLICY,
    )
    weights: tuple[tuple[str, float], ...] = setting(
        help="a weight of the policy, as NAME=VALUE; repeat for more",
        env="VLLM_PD_ROUTER_WEIGHTS",
        flag="--weight",
        parse=setting_parsers.numbers_by_name,
        default=(),
    )
    temperature: float = setting(
        help="0 takes the best worker; higher values spread requests over nearly equal ones",
        env="VLLM_PD_ROUTER_TEMPERATURE",
        flag="--temperature",
        parse=layered.number(0, high=1000),
        default=0.0,
    )
    seed: int = setting(
        help="makes what --temperature does repeatable; -1 takes another seed at every start",
        env="VLLM_PD_ROUTER_SEED",
        flag="--seed",
        parse=layered.integer(-1, 2**53),
        default=-1,
    )
    allow_overrides: bool = setting(
        help="whether the headers x-vllm-pd-policy, x-vllm-pd-temperature and x-vllm-pd-disagg of a request are "
        "obeyed: on or off",
        env="VLLM_PD_ROUTER_ALLOW_OVERRIDES",
        flag="--allow-overrides",
        parse=layered.boolean,
        default=True,
    )
    client_transfer_params: str = setting(
        help="requests with a kv_transfer_params of the client's own, which gives access to other requests' KV: "
        "refuse or pass",
        env="VLLM_PD_ROUTER_CLIENT_TRANSFER_PARAMS",
        flag="--client-transfer-params",
        parse=layered.choice(*ClientTransfer),
        default=ClientTransfer.REFUSE,
    )
    session_header: str = setting(
        help="header that names a client's session, which then stays on one worker where the policy allows",
        env="VLLM_PD_ROUTER_SESSION_HEADER",
        flag="--session-header",
        parse=setting_parsers.header_name,
        default="x-vllm-pd-session",
    )
    session_ttl: float = setting(
        help="seconds after a session's last request until its worker is forgotten",
        env="VLLM_PD_ROUTER_SESSION_TTL",
        flag="--session-ttl",
        parse=_seconds,
        default=1800.0,
    )
    index: bool = setting(
        help="whether prompts are looked up in the store's block index: on or off",
        env="VLLM_PD_ROUTER_INDEX",
        flag="--index",
        parse=layered.boolean,
        default=True,
    )
    serve_before_index: bool = setting(
        help="be ready at once after a start, and route by load alone until the block index is loaded",
        env="VLLM_PD_ROUTER_SERVE_BEFORE_INDEX",
        flag="--serve-before-index",
        parse=layered.boolean,
        default=False,
    )
    tokenizer: str = setting(
        help="folder or tokenizer.json of the model, instead of the one that its workers publish",
        env="VLLM_PD_ROUTER_TOKENIZER",
        flag="--tokenizer",
        parse=setting_parsers.existing_path,
        default="",
    )
    disagg: str = setting(
        help=f"when prompts are prefilled on another worker: {', '.join(Disagg)}",
        env="VLLM_PD_ROUTER_DISAGG",
        flag="--disagg",
        parse=layered.choice(*Disagg),
        default=Disagg.AUTO,
    )
    disagg_options: tuple[tuple[str, float], ...] = setting(
        help="a parameter of that rule, as NAME=VALUE; repeat for more",
        env="VLLM_PD_ROUTER_DISAGG_OPTIONS",
        flag="--disagg-option",
        parse=setting_parsers.numbers_by_name,
        default=(),
    )
    max_local_prefill_tokens: int | str = setting(
        help="prompts of which a decode worker lacks at most this many tokens are prefilled there; auto: as the rule "
        "of --disagg finds out",
        env="VLLM_PD_ROUTER_MAX_LOCAL_PREFILL_TOKENS",
        flag="--max-local-prefill-tokens",
        parse=setting_parsers.tokens_or_auto,
        default=setting_parsers.AUTO,
    )
    require_prefill: bool = setting(
        help="strict: refuse requests while no worker prefills for others, and those whose prefill fails, rather than "
        "have decode workers compute the prompts: on or off",
        env="VLLM_PD_ROUTER_REQUIRE_PREFILL",
        flag="--require-prefill",
        parse=layered.boolean,
        default=False,
    )
    worker_api_key: str = setting(
        help="key that the workers ask for (their --api-key); better set by its environment variable",
        env="VLLM_PD_WORKER_API_KEY",
        flag="--worker-api-key",
        parse=setting_parsers.key,
        default="",
        secret=True,
    )
    api_key: str = setting(
        help="key that clients must send as a bearer token; better set by its environment variable",
        env="VLLM_PD_ROUTER_API_KEY",
        flag="--api-key",
        parse=setting_parsers.key,
        default="",
        secret=True,
    )
    role_moves: str = setting(
        help="whether POST /v1/roles may change workers' roles: on, off, or auto (where an API key is set, or only "
        "this host reaches the router)",
        env="VLLM_PD_ROUTER_ROLE_MOVES",
        flag="--role-moves",
        parse=layered.choice("auto", "on", "off"),
        default="auto",
    )
    planner: bool = setting(
        help="run a planner in this router, which decides who prefills and who decodes; of several routers and "
        "planners of a cluster one decides. Its settings: VLLM_PD_PLANNER_... and --planner-config",
        env="VLLM_PD_ROUTER_PLANNER",
        flag="--planner",
        parse=layered.boolean,
        default=False,
    )
    planner_config: str = setting(
        help="YAML file with settings of that planner (see vllm-pd planner run --help), or a section planner",
        env="VLLM_PD_ROUTER_PLANNER_CONFIG",
        flag="--planner-config",
        parse=setting_parsers.existing_path,
        default="",
    )
    worker_ca: str = setting(
        help="PEM file with the authority that signed the certificates of https workers",
        env="VLLM_PD_ROUTER_WORKER_CA",
        flag="--worker-ca",
        parse=layered.text,
        default="",
    )
    worker_insecure: bool = setting(
        help="accept any certificate of https workers (for tests only)",
        env="VLLM_PD_ROUTER_WORKER_INSECURE",
        flag="--worker-insecure",
        parse=layered.boolean,
        default=False,
    )
    prefill_dispatch: str = setting(
        help="how prefill work reaches workers: queue (through the store, where workers claim it) or direct",
        env="VLLM_PD_ROUTER_PREFILL_DISPATCH",
        flag="--prefill-dispatch",
        parse=layered.choice("queue", "direct"),
        default="queue",
    )
    queue_timeout: float = setting(
        help="seconds that prefill work may wait in the queue until a worker claims it; then the decode worker does it",
        env="VLLM_PD_ROUTER_QUEUE_TIMEOUT",
        flag="--queue-timeout",
        parse=_seconds,
        default=10.0,
    )
    prefill_timeout: float = setting(
        help="seconds for the prefill leg; then the request goes whole to a decode worker",
        env="VLLM_PD_ROUTER_PREFILL_TIMEOUT",
        flag="--prefill-timeout",
        parse=_seconds,
        default=60.0,
    )
    connect_timeout: float = setting(
        help="seconds to connect to a worker; then another one is tried",
        env="VLLM_PD_ROUTER_CONNECT_TIMEOUT",
        flag="--connect-timeout",
        parse=_seconds,
        default=2.0,
    )
    first_byte_timeout: float = setting(
        help="seconds until an answer begins; without streaming that is the whole generation",
        env="VLLM_PD_ROUTER_FIRST_BYTE_TIMEOUT",
        flag="--first-byte-timeout",
        parse=_seconds,
        default=600.0,
    )
    idle_timeout: float = setting(
        help="seconds without a byte, from either side, after which a request in progress is given up",
        env="VLLM_PD_ROUTER_IDLE_TIMEOUT",
        flag="--idle-timeout",
        parse=_seconds,
        default=120.0,
    )
    continue_streams: int = setting(
        help="how many times a stream whose worker is lost may be continued on another; 0 ends it with an error",
        env="VLLM_PD_ROUTER_CONTINUE_STREAMS",
        flag="--continue-streams",
        parse=layered.integer(0, 100),
        default=2,
    )
    health_timeout: float = setting(
        help="seconds without any sign of life after which a worker that has requests counts as down",
        env="VLLM_PD_ROUTER_HEALTH_TIMEOUT",
        flag="--health-timeout",
        parse=_seconds,
        default=5.0,
    )
    stuck_timeout: float = setting(
        help="seconds after which an engine that has requests and makes no step counts as stuck",
        env="VLLM_PD_ROUTER_STUCK_TIMEOUT",
        flag="--stuck-timeout",
        parse=_seconds,
        default=10.0,
    )
    down_timeout: float = setting(
        help="seconds that requests wait for a worker that is down when no other can take them",
        env="VLLM_PD_ROUTER_DOWN_TIMEOUT",
        flag="--down-timeout",
        parse=_seconds,
        default=30.0,
    )
    retry_ratio: float = setting(
        help="retries on other workers that are allowed for each request of the last minute",
        env="VLLM_PD_ROUTER_RETRY_RATIO",
        flag="--retry-ratio",
        parse=layered.number(0, high=10),
        default=0.2,
    )
    retry_floor: float = setting(
        help="retries a minute that are allowed however few requests there are",
        env="VLLM_PD_ROUTER_RETRY_FLOOR",
        flag="--retry-floor",
        parse=layered.number(0, high=1e6),
        default=100.0,
    )
    shutdown_grace: float = setting(
        help="seconds that requests in progress get to finish after SIGTERM",
        env="VLLM_PD_ROUTER_SHUTDOWN_GRACE",
        flag="--shutdown-grace",
        parse=layered.number(0, high=86400),
        default=30.0,
    )
    max_body_mib: float = setting(
        help="longest request body in MiB",
        env="VLLM_PD_ROUTER_MAX_BODY_MIB",
        flag="--max-body-mib",
        parse=layered.number(0, exclusive=True, high=4096),
        default=64.0,
    )
    log_level: str = setting(
        help="debug, info, warning or error",
        env="VLLM_PD_ROUTER_LOG_LEVEL",
        flag="--log-level",
        parse=layered.log_level,
        default="info",
    )

    @property
    def split_rule(self) -> SplitRule:
        """When a request is split. Raises SettingsError if the settings for it do not fit together."""
        limit = self.max_local_prefill_tokens
        rule = split_rule(self.disagg, limit if isinstance(limit, int) else None, self.disagg_options)
        if any(name == "max_wait" for name, _ in self.disagg_options):
            return rule
        # What would wait for longer in the queue comes back from there.
        return replace(rule, max_wait=self.queue_timeout)

    @property
    def allows_role_moves(self) -> bool:
        """Whether `POST /v1/roles` is obeyed."""
        local = self.host in ("localhost", "::1") or self.host.startswith("127.")
        return self.role_moves == "on" or (self.role_moves == "auto" and (bool(self.api_key) or local))

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * MIB)


def load(
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Mapping[str, Any] | None = None,
    file_name: str = "the settings file",
) -> Resolved[RouterSettings]:
    """Merge the layers and check that the settings fit together.

    Raises:
        SettingsError: one sentence that says what to change.
    """
    resolved = layered.resolve(RouterSettings, flags=flags, environ=environ, file=file, file_name=file_name)
    settings = resolved.value
    if not settings.store and not settings.workers:
        raise SettingsError(
            "The router has no way to find workers; give --store redis://host:6379 (or VLLM_PD_STORE), "
            "or name them with --worker URL=role."
        )
    if settings.planner and not settings.store:
        raise SettingsError("--planner needs the store where the workers register; give --store, or run without it.")
    if settings.planner_config and not settings.planner:
        raise SettingsError("--planner-config is for the planner of this router; give --planner too, or drop it.")
    policies.policy(settings.policy, settings.weights)
    if settings.split_rule.name is Disagg.NEVER and settings.require_prefill:
        raise SettingsError("--disagg never and --require-prefill contradict each other; keep one.")
    if settings.worker_ca and settings.worker_insecure:
        raise SettingsError("--worker-ca and --worker-insecure contradict each other; keep one.")
    return resolved
