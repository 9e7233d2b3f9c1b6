"""A live twin decides what a simulation of its recording decides, step by step, and its clients get those tokens."""

import tempfile
from collections import defaultdict
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.sim.fleet_samples import COST, MS, ROOMY, S
from tests.sim.test_adapters import Adapted
from tests.sim.test_fleet_properties import fleets
from tokentwin.apiserver.failures import Accidents, CutAnswers, ServedFailures
from tokentwin.apiserver.ledger import Ledger
from tokentwin.apiserver.messages import About, Add
from tokentwin.apiserver.twin import AnswerLengths, Twin
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig, parse
from tokentwin.serving.deployments.fleet import FleetConfig
from tokentwin.serving.deployments.lora import LoraConfig
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.live_cluster import LiveCluster
from tokentwin.sim.run_log import _SERVED_ONLY as SERVED_ONLY
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.live_recording import LiveRecording, recover
from tokentwin.traces.recording import JOURNAL, Recording
from tokentwin.traces.recording_writer import RecordingWriter

ABOUT = About("a-model", 600, [0], "", 1000, True, 16)
FILLER = range(100, 612)
LATEST_NS = 40 * S


@dataclass(frozen=True)
class Chat:
    """A client: its prompt, its further turns, and when it has had enough."""

    begins_ms: int
    document: int
    document_tokens: int
    own_tokens: int
    output: int
    turns: int
    think_ms: int
    stops_at: int | None  # index of the token that completes a stop string
    leaves_ms: int | None  # ms after it asked, when its client leaves
    ignore_eos: bool
    priority: int
    user: str
    adapter: str = ""


chats = st.builds(
    Chat,
    begins_ms=st.integers(0, 900),
    document=st.integers(0, 2),
    document_tokens=st.sampled_from([0, 15, 16, 64, 200]),
    own_tokens=st.integers(1, 90),
    output=st.integers(1, 60),
    turns=st.integers(1, 3),
    think_ms=st.sampled_from([0, 6, 100]),
    stops_at=st.none() | st.integers(1, 30),
    leaves_ms=st.none() | st.sampled_from([0, 1, 12, 200]),
    ignore_eos=st.booleans(),
    priority=st.integers(-1, 1),
    user=st.sampled_from(["", "a", "b"]),
)


@dataclass
class Wire:
    """Stands for the exchange between processes; keeps what was delivered, and when clients should have left."""

    stalled_ns: int = 0
    given: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    due_ns: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, str] = field(default_factory=dict)
    _unsent: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def give(self, id, tokens, logprobs=None):
        assert id not in self.ends
        self.given[id] += tokens
        self._unsent[id] += len(tokens)

    def give_prompt(self, id, cached, logprobs=None): ...

    def end(self, id, finish, reason=""):
        assert id not in self.ends
        self.ends[id] = finish

    def flush(self, due_ns):
        for id, tokens in self._unsent.items():
            self.due_ns[id] += [due_ns] * tokens
        self._unsent.clear()


class Counted:
    """Stands for the metrics."""

    def expects(self, id, received_ns): ...
    def step(self, end): ...
    def request(self, row, asked): ...


class Served:
    """A twin that serves `chats` to their ends, on a clock that is `late_ns` late at every turn."""

    def __init__(self, folder, cluster, chats, late_ns, speed, cut_after=None):
        self.now_ns = 5 * S
        cuts = () if cut_after is None else (CutAnswers(after_tokens=cut_after, share=0.5),)
        self.wire = Wire()
        self.twin = Twin(
            ABOUT,
            lambda sink, on_tokens: cluster(LiveCluster, sink, block=1, on_tokens=on_tokens),
            self.wire,
            AnswerLengths(lambda number: 1 + number * 7 % 40),
            FILLER,
            16,
            speed,
            lambda: self.now_ns,
            Accidents(ServedFailures(cuts=cuts)),
        )
        run = {"run_id": "live", "clock": "virtual", "workload": "served", "deployment": "{}", "replicas": 1}
        run |= {"seed": 0, "num_blocks": 1}
        self.ledger = self.twin.ledger = Ledger(self.twin, Counted(), LiveRecording(RecordingWriter(folder, run), run))
        self._chats, self._late_ns, self._speed = chats, late_ns, speed
        self._events, self._order, self._ids = [], count(), count()
        self._asked = {}  # by id: the chat, its turn, and the prompt
        self._heard = set()
        for chat in chats:
            document = [1000 * chat.document + at for at in range(chat.document_tokens)]
            self._at(chat.begins_ms * MS, self._ask, chat, 0, document)
        self._talk()
        self.twin.close()
        self._listen()
        assert not self.ledger.undelivered
        self.journal = (folder / JOURNAL).read_bytes()
        self.ledger.close()

    def _talk(self):
        while self.now_ns < LATEST_NS and (self._events or self.ledger.under_way):
            while self._events and self._events[0][0] <= self.now_ns:
                _, _, what, args = heappop(self._events)
                what(*args)
            wait_s = self.twin.turn()
            self._listen()
            wake_ns = LATEST_NS if wait_s is None else self.now_ns + round(wait_s * S)
            if self._events:
                wake_ns = min(wake_ns, self._events[0][0])
            self.now_ns = max(wake_ns + self._late_ns, self.now_ns + 1)

    def _at(self, after_ns, what, *args):
        heappush(self._events, (self.now_ns + int(after_ns / self._speed), next(self._order), what, args))

    def _ask(self, chat, turn, said):
        id = next(self._ids)
        prompt = said + [10_000 + 100 * id + at for at in range(chat.own_tokens)]
        stop_ids = [] if chat.ignore_eos else [0]
        asked = Add(id, prompt, chat.output, self.now_ns, 0, stop_ids, priority=chat.priority, tenant=chat.user)
        asked.adapter = chat.adapter
        self._asked[id] = chat, turn, prompt
        self.ledger.expects(id, asked)
        self.twin.add(id, asked)
        if chat.leaves_ms is not None:
            self._at(chat.leaves_ms * MS, self._leave, id)

    def _leave(self, id):
        if id not in self.wire.ends:
            self.twin.abort(id, "its client went away")
            self.ledger.delivered(id, None)
            self._heard.add(id)

    def _listen(self):
        for id, (chat, turn, prompt) in list(self._asked.items()):
            if id in self._heard:
                continue
            stopped = chat.stops_at is not None and len(self.wire.given[id]) >= chat.stops_at
            if stopped or id in self.wire.ends:
                self._heard.add(id)
                if stopped:
                    self.twin.abort(id, "stop")
                if self.wire.ends.get(id) != "cut":  # which nobody says was delivered
                    self.ledger.delivered(id, None)
                if turn + 1 < chat.turns and len(prompt) < 400:
                    said = prompt + self.wire.given[id][: chat.stops_at]
                    self._at(chat.think_ms * MS, self._ask, chat, turn + 1, said)


@st.composite
def any_fleets(draw):
    """Return fleets of any kind, those with separate prefill included."""
    fleet = draw(fleets())
    if draw(st.integers(0, 3)) == 0:
        prefills, decodes = fleet["pools"]
        prefills["role"], decodes["role"] = "prefill", "decode"
        decodes["replicas"] += 1
        fleet["links"] = {"kv_bytes_per_token": 100_000}
        fleet["first_token_from"] = draw(st.sampled_from(["prefill", "decode"]))
    return fleet


@given(
    fleet=any_fleets(),
    chats=st.lists(chats, min_size=1, max_size=25),
    policy=st.sampled_from(["vllm", "sarathi", "sjf", "fair", "priority-ageing"]),
    blocks=st.sampled_from([42, 90, 2000]),
    overlapped=st.booleans(),
    late_ns=st.sampled_from([0, 300_000, 7 * MS, 300 * MS]),
    speed=st.sampled_from([1.0, 7.3]),
    cut_after=st.none() | st.integers(1, 30),
    killed_at=st.floats(0, 1),
)
@examples(1)
def test_a_recording_of_a_live_twin_simulates_to_the_same_decisions(
    fleet, chats, policy, blocks, overlapped, late_ns, speed, cut_after, killed_at
):
    scheduler = {"num_blocks": blocks, "max_num_seqs": 6, "max_model_len": 600, "async_scheduling": overlapped}
    deployment = Deployment(policy=policy, scheduler=SchedulerConfig(**{**ROOMY, **scheduler}))
    config = parse(FleetConfig, fleet, where="fleet")

    def cluster(kind, sink, **more):
        return kind(deployment, COST, sink, fleet=config, steps=True, tokens=True, **more)

    assert_repeats(cluster, chats, late_ns, speed, cut_after, killed_at)


@given(
    chats=st.lists(st.tuples(chats, st.sampled_from(["", "x", "y", "z"])), min_size=1, max_size=25),
    slots=st.integers(1, 3),
    in_host_memory=st.integers(0, 1),
    blocks=st.sampled_from([42, 2000]),
    router=st.sampled_from(["round-robin", "adapter-affinity"]),
    late_ns=st.sampled_from([0, 7 * MS]),
    speed=st.sampled_from([1.0, 7.3]),
    killed_at=st.floats(0, 1),
)
@examples(1)
def test_adapters_are_recorded_too(chats, slots, in_host_memory, blocks, router, late_ns, speed, killed_at):
    # in the overlapped loop, a load delays outputs of the step before it; `token_times_ns` are the ends of steps
    scheduler = {"num_blocks": blocks, "max_num_seqs": 6, "max_model_len": 600, "async_scheduling": False}
    lora = LoraConfig(max_loras=slots, max_cpu_loras=slots + in_host_memory)
    deployment = Deployment(scheduler=SchedulerConfig(**{**ROOMY, **scheduler}), lora=lora)
    config = parse(FleetConfig, {"pools": [{"replicas": 2}], "router": router}, where="fleet")

    def cluster(kind, sink, **more):
        return kind(deployment, Adapted(6 * MS, 18_000, 450), sink, fleet=config, steps=True, tokens=True, **more)

    assert_repeats(cluster, [replace(chat, adapter=name) for chat, name in chats], late_ns, speed, None, killed_at)


def assert_repeats(cluster, chats, late_ns, speed, cut_after, killed_at):
    """Serve `chats`, and assert that a simulation of the recording does the same."""
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder), cluster, chats, late_ns, speed, cut_after)
        recording = Recording.load(folder)
        again = TableSink()
        simulated = cluster(Cluster, again)
        done = simulated.run(recording.workload())
        requests = recording.requests
        assert recording.run["replica_lives"] == simulated.replica_lives
        assert recording.run["duration_ns"] == done.duration_ns
        assert_same_steps(recording.steps.to_pylist(), again.steps.to_pylist(), requests)
        assert_same_requests(requests, again.requests)
        assert_given(served, requests)
        assert_recovered(served.journal[: round(killed_at * len(served.journal))], recording, cluster)


def assert_recovered(journal, whole, cluster):
    """Assert that everything that a killed process had recorded is there, and that it repeats."""
    folder = whole.path / "killed"
    folder.mkdir()
    (folder / JOURNAL).write_bytes(journal)
    recover(folder)
    if not (folder / "runs.parquet").exists():
        assert len(journal) < 300  # it had not even said what it runs
        return
    recovered = Recording.load(folder)
    assert recovered.run["status"] == "interrupted" and not (folder / JOURNAL).exists()
    steps, requests = recovered.steps.to_pylist(), recovered.requests.to_pylist()
    assert steps == whole.steps.to_pylist()[: len(steps)]
    left = {row["request_id"]: row for row in whole.requests.to_pylist()}
    gone = [row for row in requests if row["status"] == "unfinished" and row["output_tokens"] is None]
    assert all(row == left[row["request_id"]] for row in requests if row not in gone)
    assert {row["arrival_ns"] for row in requests} <= {row["arrival_ns"] for row in left.values()}
    again = TableSink()
    if requests:
        cluster(Cluster, again).run(recovered.workload())
    for ours, theirs in zip(steps, again.steps.to_pylist(), strict=False):
        assert ours == theirs


def assert_same_steps(live, again, requests):
    """Assert equal steps for requests that ended before the last one did, which is when a simulation ends.

    Rows of steps that are in flight when clients leave may come in another order.
    """
    live, again = (sorted(steps, key=lambda step: (step["end_ns"], step["replica"])) for steps in (live, again))
    last_ns = max(requests.column("end_ns").to_pylist())
    for ours, theirs in zip(live, again, strict=False):
        assert ours == theirs
    assert len(again) <= len(live) and all(step["end_ns"] >= last_ns for step in live[len(again) :])


def assert_same_requests(live, again):
    rows = {row["request_id"]: row for row in again.drop(list(SERVED_ONLY)).to_pylist()}
    for row in live.drop(list(SERVED_ONLY)).to_pylist():
        same = rows.pop(row["request_id"])
        if row["reason"] not in ("", same["reason"]):  # its client went away, and why is not in a workload
            assert same["status"] == "cancelled" and row["status"] in ("cancelled", "unfinished")
            for name in ("status", "reason"):
                del row[name], same[name]
        assert row == same
    assert not rows


def assert_given(served, requests):
    """Assert that clients got what the rows say, at the times that they say; nothing twice, nothing lost."""
    wire, twin = served.wire, served.twin
    assert set(wire.ends) == set(requests.column("request_id").to_pylist())
    for row in requests.to_pylist():
        id, tokens = row["request_id"], len(wire.given[row["request_id"]])
        assert wire.due_ns[id] == sorted(wire.due_ns[id]) and len(wire.due_ns[id]) == tokens
        if wire.ends[id] == "cut":
            continue  # what its server did for it since, it never got
        if row["status"] == "finished" and row["attempts"] > 1:
            assert tokens >= row["output_tokens"]  # what an attempt that came to nothing gave is not given again
        elif row["status"] == "finished":
            assert tokens == row["output_tokens"]
            assert wire.due_ns[id] == [twin.monotonic_ns(at_ns) for at_ns in row["token_times_ns"]]
