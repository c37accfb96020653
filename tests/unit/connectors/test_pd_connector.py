"""What PDConnector composes, and how it handles a hand-off; the children are vLLM's own."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm_pd import transfer_config as tc
from vllm_pd.connectors import pd_connector
from vllm_pd.connectors.farewells import STEPPING_S
from vllm_pd.connectors.handoff_lease import EXTENSION_FIELD, FIELD, HandoffLease
from vllm_pd.connectors.handoffs import Handoffs
from vllm_pd.connectors.pd_connector import PDConnector, expand, register_specs
from vllm_pd.connectors.pd_metadata import PDMetadata
from vllm_pd.connectors.read_leases import ReadLease, ReadLeases
from vllm_pd.connectors.send_leases import SendLeases
from vllm_pd.given_up import give_up_params, handoff_in
from vllm_pd.plugin import register
from vllm_pd.settings import WorkerSettings, from_extra_config
from vllm_pd.vllm_compat import KVConnectorFactory, KVTransferConfig, OffloadingSpecFactory

pytestmark = pytest.mark.vllm

SSD = WorkerSettings(cpu_gib=1.0, ssd_path="/somewhere", ssd_gib=2.0)


@pytest.fixture(autouse=True)
def plugin() -> None:
    register()


def children(config: KVTransferConfig) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = config.kv_connector_extra_config["connectors"]
    return listed


def test_nixl_is_asked_before_the_tiers() -> None:
    names = [child["kv_connector"] for child in children(expand(tc.build(WorkerSettings(cpu_gib=1.0))))]
    assert names == ["NixlConnector", "OffloadingConnector"]


def test_expanding_twice_changes_nothing_and_leaves_the_original() -> None:
    config = tc.build(SSD)
    before = copy.deepcopy(config.kv_connector_extra_config)
    once = expand(config, "identity")
    assert expand(once, "other") is once
    assert config.kv_connector_extra_config == before
    assert once.engine_id == config.engine_id


def test_the_identity_reaches_the_ssd_tier_and_not_the_users_options() -> None:
    options = {"ssd": {"path": "/else", "gib": 3}}
    config = tc.build(dataclasses.replace(SSD, tiers=options))
    offload = children(expand(config, "abc"))[1]["kv_connector_extra_config"]
    assert offload["ssd"] == {"path": "/else", "gib": 3, "identity": "abc"}
    assert options == {"ssd": {"path": "/else", "gib": 3}}


def test_specs_are_registered_once() -> None:
    register_specs()
    register_specs()
    for name in pd_connector.SPECS:
        assert OffloadingSpecFactory._registry[name]().__name__ == name


def test_questions_that_vllm_asks_the_class_are_answered_for_the_children() -> None:
    config = tc.build(WorkerSettings(cpu_gib=1.0))
    assert not PDConnector.requires_piecewise_for_cudagraph(config.kv_connector_extra_config)
    assert PDConnector.all_children_support_hma(expand(config))
    assert KVConnectorFactory.supports_hma_config(config)


@pytest.mark.parametrize(
    "passed_on",
    [
        copy.copy,
        copy.deepcopy,
        dataclasses.replace,
        lambda config: pickle.loads(pickle.dumps(config)),  # noqa: S301
    ],
    ids=["copy", "deepcopy", "replace", "pickle"],
)
def test_the_configuration_answers_for_its_children_after_every_way_of_passing_it_on(passed_on: Any) -> None:
    config = tc.build(from_extra_config({"store": "redis://u:hunter2@h:1", "cpu_gib": 1}))
    arrived = passed_on(config)
    assert arrived == config
    assert type(arrived) is tc.PDKVTransferConfig
    assert arrived.has_connector("NixlConnector") and arrived.has_connector("OffloadingConnector")
    assert arrived.has_connector("pd") and not arrived.has_connector("MooncakeConnector")
    assert "hunter2" not in repr(arrived)


def test_the_configuration_stays_what_it_is_inside_vllms_own() -> None:
    from vllm.config import VllmConfig

    config = tc.build(WorkerSettings(cpu_gib=1.0))
    assert VllmConfig(kv_transfer_config=config).kv_transfer_config is config


class FakeScheduler:
    """The scheduler half of a child: NIXL's, as far as heartbeats go."""

    def __init__(self) -> None:
        self.stopped: list[str] = []
        self.heartbeats: dict[str, object] = {}
        self.is_bidirectional_kv_xfer_enabled = self._is_hma_required = False
        self.kv_cache_config = SimpleNamespace(transfer_groups=[None])
        self.block_size = 32
        self.engine_id = "here"
        self._reqs_need_recv: dict[str, Any] = {}

    def _get_remote_prefill_token_count(self, num_prompt_tokens: int) -> int:
        return num_prompt_tokens

    @property
    def connector_scheduler(self) -> FakeScheduler:
        return self

    def _stop_heartbeat(self, req_id: str) -> None:
        self.stopped.append(req_id)

    def update_connector_output(self, output: Any) -> None:
        pass

    def on_new_request(self, request: Any) -> None:
        self.seen = bool(request.kv_transfer_params and request.kv_transfer_params.get("do_remote_prefill"))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        wanted = bool(request.kv_transfer_params and request.kv_transfer_params.get("do_remote_prefill"))
        return (100, True) if wanted else (0, False)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return SimpleNamespace(heartbeat_by_engine=dict(self.heartbeats))

    def has_pending_push_work(self) -> bool:
        return False

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any]]:
        return True, {"do_remote_prefill": True, "do_remote_decode": False}


class Clock:
    """Both clocks of the connector, in the test's hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(
            pd_connector,
            "time",
            SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now, perf_counter=lambda: self.now),
        )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def connector_over(nixl: FakeScheduler) -> PDConnector:
    """A connector whose only child is `nixl`, without an engine."""
    connector: PDConnector = PDConnector.__new__(PDConnector)
    connector._connectors = [nixl]
    connector._all_support_hma = True
    connector._requests_to_connector, connector._extra_async_saves = {}, {}
    connector._handoffs, connector._nixl = Handoffs(nixl), 0
    connector._gate = connector._ssd = connector._tiers = None
    connector._kept, connector._reads, connector._sends = set(), ReadLeases(), None
    return connector


HANDOFF = {
    "do_remote_prefill": True, "remote_engine_id": "engine", "remote_request_id": "there", "remote_host": "h",
    "remote_port": 5600, "tp_size": 1, "remote_block_ids": [[7, 8, 9, 10]], "remote_num_tokens": 100,
}  # fmt: skip


def handed_off(at: float, **changes: Any) -> Any:
    params = HandoffLease().stamp({**HANDOFF, **changes}, at)
    return SimpleNamespace(
        request_id="r", kv_transfer_params=params, prompt_token_ids=[0] * 100, abort_immediately=False
    )


def test_a_late_hand_off_never_reaches_nixl(clock: Clock) -> None:
    nixl = FakeScheduler()
    connector, request = connector_over(nixl), handed_off(clock.now - 26)
    connector.on_new_request(request)
    assert not nixl.seen
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_hand_off_that_waited_too_long_is_computed_and_its_heartbeats_end(clock: Clock) -> None:
    nixl = FakeScheduler()
    connector, request = connector_over(nixl), handed_off(clock.now)
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (100, True)
    clock.now += 26
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert nixl.stopped == ["r"]


def test_only_steps_that_carry_heartbeats_extend_the_wait(clock: Clock) -> None:
    nixl = FakeScheduler()
    connector, request = connector_over(nixl), handed_off(clock.now)
    connector.on_new_request(request)
    nixl.heartbeats = {"engine": object()}
    for _ in range(10):
        clock.now += 5
        connector.build_connector_meta(None)
        assert connector.get_num_new_matched_tokens(request, 0) == (100, True)
    nixl.heartbeats = {}
    clock.now += 16
    connector.build_connector_meta(None)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_request_that_asked_for_its_blocks_is_left_alone_however_long_it_takes(clock: Clock) -> None:
    """vLLM takes the mark off when it asks; a later preemption must find it as vLLM left it."""
    nixl = FakeScheduler()
    connector, request = connector_over(nixl), handed_off(clock.now)
    connector.on_new_request(request)
    request.kv_transfer_params["do_remote_prefill"] = False
    clock.now += 1000
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert nixl.stopped == []


def test_handshakes_of_pipeline_stages_reach_nixl_and_not_the_tiers() -> None:
    """vLLM's OffloadingConnector refuses them, and its MultiConnector gives them to every child."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    served: list[Any] = []
    nixl = SimpleNamespace(set_xfer_handshake_metadata_pp_aware=served.append)
    connector = connector_over(FakeScheduler())
    connector._connectors = [nixl, OffloadingConnector.__new__(OffloadingConnector)]
    metadata: Any = {(0, 0): object(), (1, 0): object()}
    connector.set_xfer_handshake_metadata_pp_aware(metadata)
    assert served == [metadata]
    connector._nixl, connector._connectors = None, connector._connectors[1:]
    connector.set_xfer_handshake_metadata_pp_aware({})


def test_a_hand_off_that_cannot_be_used_is_computed(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    nixl = FakeScheduler()
    connector, request = connector_over(nixl), handed_off(clock.now, remote_port=-1)
    connector.on_new_request(request)
    assert not nixl.seen
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert "computed here: its hand-off cannot be used (remote_port is no port)" in caplog.text


def test_a_refused_request_without_its_prompt_still_lets_go_of_its_blocks(clock: Clock) -> None:
    """vLLM's API server sends it so, for the prefill worker to be told."""
    nixl = FakeScheduler()
    connector, request = connector_over(nixl), handed_off(clock.now)
    request.prompt_token_ids, request.abort_immediately = [0], True
    connector.on_new_request(request)
    assert nixl.seen


def test_a_prefill_leg_that_names_blocks_reads_none(clock: Clock) -> None:
    """vLLM would have it wait for them, and ask nobody."""
    connector, leg = connector_over(FakeScheduler()), prefill_leg("k")
    leg.kv_transfer_params["remote_block_ids"] = [[1]]
    connector.on_new_request(leg)
    assert leg.kv_transfer_params["remote_block_ids"] is None


def test_a_prefill_worker_states_its_lease(clock: Clock) -> None:
    connector = connector_over(FakeScheduler())
    request = SimpleNamespace(request_id="r", kv_transfer_params={"do_remote_decode": True})
    keep, params = connector.request_finished_all_groups(request, ([1],))
    assert keep and params is not None
    assert params[FIELD] == int((clock.now + 25) * 1000)
    assert params[EXTENSION_FIELD] == 15_000


def told(connector: PDConnector) -> PDMetadata:
    """What the workers are told with the next step."""
    meta = connector.build_connector_meta(None)  # type: ignore[arg-type]
    assert isinstance(meta, PDMetadata)
    return meta


def prefill_leg(key: str) -> Any:
    params = {"do_remote_decode": True, "pd_hold": key}
    return SimpleNamespace(request_id="p", kv_transfer_params=params, prompt_token_ids=[0] * 100)


def release_of(*keys: object) -> Any:
    params: dict[str, Any] = {"pd_release": list(keys)}
    return SimpleNamespace(request_id="x", kv_transfer_params=params, prompt_token_ids=[0])


def test_the_workers_are_told_once_until_when_a_new_hand_off_may_be_read(clock: Clock) -> None:
    connector = connector_over(FakeScheduler())
    connector.on_new_request(handed_off(clock.now - 3))
    clock.now += 1
    assert told(connector).new_leases == (ReadLease(("engine", "there"), pytest.approx(1000 - 3 + 25), 15),)
    assert told(connector).new_leases == ()


def test_the_workers_are_told_nothing_of_a_hand_off_that_is_not_read(clock: Clock) -> None:
    connector = connector_over(FakeScheduler())
    connector.on_new_request(handed_off(clock.now - 26))
    assert told(connector).new_leases == ()


def test_a_finished_prefill_leg_is_let_go_by_its_key(clock: Clock) -> None:
    connector, leg = connector_over(FakeScheduler()), prefill_leg("k")
    connector.on_new_request(leg)
    connector.request_finished_all_groups(leg, ([1],))
    connector.on_new_request(release_of("other"))
    assert told(connector).released == ()
    connector.on_new_request(release_of("k"))
    assert told(connector).released == ("p",)
    assert told(connector).released == ()


def test_blocks_that_were_read_are_not_let_go_again(clock: Clock) -> None:
    from vllm.v1.outputs import KVConnectorOutput

    connector, leg = connector_over(FakeScheduler()), prefill_leg("k")
    connector.on_new_request(leg)
    connector.request_finished_all_groups(leg, ([1],))
    connector.update_connector_output(KVConnectorOutput(finished_sending={"p"}))
    connector.on_new_request(release_of("k"))
    assert told(connector).released == ()


def test_what_is_told_to_be_sent_and_was_not_waited_for_does_not_reach_vllm(clock: Clock) -> None:
    from vllm.v1.outputs import KVConnectorOutput

    connector, leg = connector_over(FakeScheduler()), prefill_leg("k")
    connector.on_new_request(leg)
    early = KVConnectorOutput(finished_sending={"p"})
    connector.update_connector_output(early)
    connector.request_finished_all_groups(leg, ([1],))
    due, again = KVConnectorOutput(finished_sending={"p", "unknown"}), KVConnectorOutput(finished_sending={"p"})
    connector.update_connector_output(due)
    connector.update_connector_output(again)
    assert (early.finished_sending, due.finished_sending, again.finished_sending) == (set(), {"p"}, set())


def test_a_release_neither_reads_blocks_nor_leaves_any(clock: Clock) -> None:
    nixl = FakeScheduler()
    connector, request = connector_over(nixl), release_of("k", 7, None, "")
    request.kv_transfer_params["do_remote_prefill"] = True
    connector.on_new_request(request)
    assert not nixl.seen
    assert request.kv_transfer_params is None
    assert told(connector).new_leases == ()


@pytest.mark.parametrize("age", [0, 60])
def test_a_release_that_comes_with_a_whole_hand_off_is_a_release_only(clock: Clock, age: float) -> None:
    """Whatever a client writes there: an error here would end the engine."""
    nixl = FakeScheduler()
    connector, request = connector_over(nixl), handed_off(clock.now - age, pd_release=["k"])
    connector.on_new_request(request)
    assert not nixl.seen
    assert request.kv_transfer_params is None
    assert told(connector).new_leases == ()


def test_an_idle_engine_goes_on_until_it_has_refused_a_hand_off(clock: Clock) -> None:
    connector, request = connector_over(FakeScheduler()), handed_off(clock.now)
    assert not connector.has_pending_push_work()
    connector.request_finished_all_groups(request, ([],))
    assert connector.has_pending_push_work()
    clock.now += STEPPING_S
    assert not connector.has_pending_push_work()


def test_an_engine_that_has_read_a_hand_off_rests_at_once(clock: Clock) -> None:
    connector, request = connector_over(FakeScheduler()), handed_off(clock.now)
    request.kv_transfer_params["do_remote_prefill"] = False
    connector.request_finished_all_groups(request, ([1],))
    assert not connector.has_pending_push_work()


def give_up(handoff: Any, engine: str = "here") -> Any:
    """A request that gives up the hand-off of another one."""
    found = handoff_in(msgspec.json.encode(handoff.kv_transfer_params))
    assert found is not None
    params = msgspec.json.decode(msgspec.json.encode(give_up_params(engine, [found])))
    return SimpleNamespace(request_id="x", kv_transfer_params=params, prompt_token_ids=[0], abort_immediately=False)


def test_of_a_hand_off_that_is_given_up_before_it_comes_the_prefill_worker_is_told(clock: Clock) -> None:
    """In the form in which vLLM tells it of a request that ends before it is scheduled."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

    nixl = FakeScheduler()
    connector, late = connector_over(nixl), handed_off(clock.now)
    request = give_up(late)
    connector.on_new_request(request)
    assert request.kv_transfer_params is None and not nixl.seen, "it reads nothing itself"
    ((name, (unread, blocks, cached, waits)),) = nixl._reqs_need_recv.items()
    meta = NixlConnectorMetadata()
    meta.add_new_req_to_recv(name, blocks, unread.kv_transfer_params, cached, waits)
    remote = meta.reqs_to_recv[name].remote
    assert remote is not None
    assert (remote.engine_id, remote.request_id, remote.host, remote.port) == ("engine", "there", "h", 5600)
    assert connector.has_pending_push_work(), "an idle engine would not step"
    connector.on_new_request(late)
    assert not nixl.seen, "it is computed and not read"
    assert told(connector).new_leases == ()


@pytest.mark.parametrize("ended", [False, True])
def test_a_hand_off_that_has_come_is_not_given_up(clock: Clock, ended: bool) -> None:
    nixl = FakeScheduler()
    connector, request = connector_over(nixl), handed_off(clock.now)
    connector.on_new_request(request)
    if ended:
        connector.request_finished_all_groups(request, ([],))
    connector.on_new_request(give_up(request))
    assert not nixl._reqs_need_recv


def test_what_another_engine_was_to_read_is_not_given_up_here(clock: Clock) -> None:
    """A worker that was started again, or another one behind the same address, cannot know what is being read."""
    nixl = FakeScheduler()
    connector, request = connector_over(nixl), handed_off(clock.now)
    connector.on_new_request(give_up(request, "before"))
    assert not nixl._reqs_need_recv
    connector.on_new_request(request)
    assert nixl.seen


def test_a_hand_off_whose_lease_is_over_is_not_given_up(clock: Clock) -> None:
    nixl = FakeScheduler()
    connector = connector_over(nixl)
    connector.on_new_request(give_up(handed_off(clock.now - 26)))
    assert not nixl._reqs_need_recv


def test_giving_up_without_transfers_is_nothing(clock: Clock) -> None:
    request = give_up(handed_off(clock.now))
    Handoffs(None).arrived(request, clock.now, clock.now)
    assert request.kv_transfer_params is None


class FakeWorker:
    """The worker half of NIXL, as far as reads and leases go."""

    def __init__(self) -> None:
        self._remote_agents = {"engine": {}}
        self._reqs_to_send: dict[str, float] = {}
        self._reqs_to_process: set[str] = set()
        self._replicated_pcp_done_sending: set[str] = set()
        self.consumer_notification_counts_by_req: dict[str, int] = {}
        self.expected_consumer_notifications_by_req: dict[str, int] = {}
        self.received: set[str] = set()
        self.failed: set[str] = set()

    @property
    def connector_worker(self) -> FakeWorker:
        return self

    def start_load_kv(self, forward_context: Any) -> None:
        pass

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        sent, self._replicated_pcp_done_sending = self._replicated_pcp_done_sending, set()
        received, self.received = self.received, set()
        return KVConnectorTransferResults(sent, received | self.failed, set(self.failed))


def worker_over(nixl: FakeWorker) -> PDConnector:
    connector = connector_over(nixl)  # type: ignore[arg-type]
    connector._sends = SendLeases(nixl)
    return connector


def step(connector: PDConnector, **told: Any) -> Any:
    """One step of the worker: what it reports."""
    nixl = SimpleNamespace(
        reqs_to_recv=told.pop("reqs_to_recv", {}), heartbeat_by_engine=told.pop("heartbeat_by_engine", {})
    )
    connector._connector_metadata = PDMetadata((nixl,), **told)
    connector.start_load_kv(None)  # type: ignore[arg-type]
    return connector.get_transfer_results(set())


READ = {
    "r": SimpleNamespace(
        remote=SimpleNamespace(engine_id="engine", request_id="there"), awaiting_kvs=True, local_block_ids=([1],)
    )
}


@pytest.mark.parametrize(("passes", "in_time"), [(24.9, True), (25.1, False)])
def test_a_read_that_ended_after_its_lease_counts_as_failed(clock: Clock, passes: float, in_time: bool) -> None:
    nixl = FakeWorker()
    connector = worker_over(nixl)
    step(connector, new_leases=(ReadLease(("engine", "there"), clock.now + 25, 15),), reqs_to_recv=READ)
    clock.now += passes
    nixl.received = {"r"}
    results = step(connector)
    assert results.finished_recving == {"r"}, "it is over in any case"
    assert results.failed_recving == (set() if in_time else {"r"})


@pytest.mark.parametrize("known", [True, False])
def test_a_heartbeat_counts_only_if_it_was_sent(clock: Clock, known: bool) -> None:
    """vLLM spends heartbeats on the handshake as long as that has not succeeded."""
    nixl = FakeWorker()
    nixl._remote_agents = {"engine": {}} if known else {}
    connector = worker_over(nixl)
    step(connector, new_leases=(ReadLease(("engine", "there"), clock.now + 25, 15),), reqs_to_recv=READ)
    clock.now += 20
    step(connector, heartbeat_by_engine={"engine": SimpleNamespace(req_ids={"there"})})
    clock.now += 10
    nixl.received = {"r"}
    assert step(connector).failed_recving == (set() if known else {"r"})


def test_a_read_that_failed_by_itself_is_no_news(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    nixl = FakeWorker()
    connector = worker_over(nixl)
    step(connector, new_leases=(ReadLease(("engine", "there"), clock.now + 25, 15),), reqs_to_recv=READ)
    clock.now += 30
    nixl.failed = {"r"}
    assert step(connector).failed_recving == {"r"}
    assert not caplog.records


def test_loads_from_the_tiers_are_not_looked_at(clock: Clock) -> None:
    nixl = FakeWorker()
    connector = worker_over(nixl)
    nixl.received = {"from a tier"}
    assert step(connector).failed_recving == set()


def test_blocks_that_are_let_go_are_reported_as_sent_once(clock: Clock) -> None:
    nixl = FakeWorker()
    nixl._reqs_to_send, nixl._reqs_to_process = {"p": 1e9}, {"p"}
    connector = worker_over(nixl)
    assert step(connector, released=("p", "unknown")).finished_sending == {"p"}
    assert step(connector, released=("p",)).finished_sending == set()
    assert not nixl._reqs_to_process
