"""The server survives many requests, slow ones, clients that leave, keys, killed processes and a full disk."""

import json
import os
import signal
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import pytest

from tests.apiserver.served import TWIN, serving
from tests.tokentwin.test_full_disk import disk_of
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.traces.live_recording import LiveRecording, recover
from tokentwin.traces.recording import Recording

LONG = {"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}


class Stream:
    """A streamed answer that is read event by event; leaving the context hangs up."""

    def __init__(self, server, body=LONG, **headers):
        self._connection = server.connect()
        headers["Content-Type"] = "application/json"
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self.response = self._connection.getresponse()
        assert self.response.status == 200, self.response.read()

    def __iter__(self):
        for line in self.response:
            if line.startswith(b"data: "):
                yield line[6:].strip()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._connection.close()
        self.response.close()

    def words(self, most):
        """Return the text of the next events."""
        return [json.loads(event)["choices"][0]["text"] for event, _ in zip(self, range(most), strict=False)]


def soon(holds):
    """Wait until `holds()`; a test that waits in vain is ended by its time limit."""
    while not holds():
        time.sleep(0.05)


def answered(server):
    """Return whether the server answers a good request."""
    try:
        return server.complete().status == 200
    except OSError:
        return False


def test_limits_of_one_server(tmp_path):
    recorded = tmp_path / "out"
    limits = ("--max-requests", 6, "--request-timeout", 2, "--client-timeout", 1, "--api-workers", 2)
    with serving(tmp_path, *TWIN, *limits, "-o", recorded) as server:
        too_many_are_sent_away(server)
        what_takes_too_long_ends(server)
        half_a_body_is_told(server)
        for name in ("mine-7", "n" * 200):
            server.ask("POST", "/v1/completions", {"prompt": "Hello", "max_tokens": 1}, X_Request_Id=name)
        assert answered(server)
        assert "Access-Control-Allow-Origin" not in server.ask("GET", "/v1/models", None, Origin="http://a").headers
        assert "Traceback" not in server.said
    rows = Recording.load(recorded).requests.to_pylist()
    gone = {row["reason"] for row in rows if row["status"] == "cancelled"}
    assert gone == {"its client went away", "it failed: the request took longer than this server allows"}
    assert {row["client_id"] for row in rows} == {"", "mine-7"}, "what its client calls a request is recorded"
    assert_gone_within_one_step(Recording.load(recorded))


def too_many_are_sent_away(server):
    streams = [Stream(server) for _ in range(6)]
    for stream in streams:
        assert len(stream.words(3)) == 3
    refused = server.complete()
    assert (
        refused.status == 429 and refused.headers["Retry-After"] == "1" and refused.error["type"] == "Too Many Requests"
    )
    for stream in streams:
        stream.__exit__()
    soon(lambda: answered(server))


def what_takes_too_long_ends(server):
    with Stream(server) as stream:
        *_, last, done = stream
    assert json.loads(last)["error"]["code"] == 504 and done == b"[DONE]"
    refused = server.ask("POST", "/v1/completions", {**LONG, "stream": False})
    assert refused.status == 504 and refused.error["type"] == "Gateway Timeout"


def half_a_body_is_told(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    answer = server.raw(head + b'{"prompt"')
    assert answer.startswith(b"HTTP/1.1 408") and b"Request Timeout" in answer


def assert_gone_within_one_step(recording):
    """Assert that the request of a client that went away is planned no more."""
    steps = recording.steps.to_pylist()
    for row in recording.requests.to_pylist():
        if row["status"] == "cancelled":
            after = [step for step in steps if row["request_id"] in step["row_ids"] and step["plan_ns"] > row["end_ns"]]
            assert not after
    assert steps[-1]["used_blocks"] < max(step["used_blocks"] for step in steps)


def test_a_twin_whose_machine_stalls_says_so_and_sends_no_burst(tmp_path):
    with serving(tmp_path, *TWIN) as server:
        (engine,) = server.processes()["engine"]
        with ThreadPoolExecutor() as pool, Stream(server, {**LONG, "max_tokens": 400}) as stream:
            whole = pool.submit(server.complete, max_tokens=400, ignore_eos=True)
            stream.words(10)
            os.kill(engine, signal.SIGSTOP)
            time.sleep(1)
            os.kill(engine, signal.SIGCONT)
            goes_on = time.monotonic()
            assert b"[DONE]" in list(stream)
            took_s = time.monotonic() - goes_on
            stalled_ms = int(whole.result().headers["X-Twin-Stalled-Ms"])
        assert 900 < stalled_ms < 10_000
        assert took_s > 2.2  # 390 steps of 6.9 ms; a burst would leave out one second
        assert "\ntokentwin:stalled_seconds_total" in server.ask("GET", "/metrics").body.decode()


def test_keys_and_tls(tmp_path):
    keys, cert, key = tmp_path / "keys.txt", tmp_path / "cert.pem", tmp_path / "key.pem"
    keys.write_text("secret-one\n\n  secret-two \n")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    try:
        subprocess.run([*make, "-out", cert, "-keyout", key], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl, which makes a certificate, is not installed")
    options = ("--api-key-file", keys, "--tls-cert", cert, "--tls-key", key, "--allowed-hosts", "127.0.0.1, A.example")
    with serving(tmp_path, *TWIN, *options) as server:
        assert server.url.startswith("https://")
        server.tls = ssl.create_default_context(cafile=cert)
        server.tls.check_hostname = False
        for given in (None, "Bearer secret-thre", "Bearer ", "\xff"):
            shown = {} if given is None else {"Authorization": given}
            for path in ("/v1/models", "/tokenize", "/v1/completions", "/nowhere"):
                refused = server.ask("GET", path, None, **shown)
                assert refused.status == 401 and refused.error["type"] == "Unauthorized"
        for given in ("secret-one", "secret-two"):
            assert server.ask("GET", "/v1/models", None, Authorization=f"Bearer {given}").status == 200
        shown = {"Authorization": "bearer secret-one"}
        for host, status in (("a.example:80", 200), ("b.example", 400), ("127.0.0.1.b.example", 400), ("[::1", 400)):
            assert server.ask("GET", "/v1/models", None, Host=host, **shown).status == status
            assert server.ask("GET", "/health", None, Host=host).status == 200, "a probe may call it by its address"
        assert server.ask("GET", "/ready").status == server.ask("GET", "/metrics").status == 200
        assert b" 200 " not in server.raw(b"GET / HTTP/1.1\r\n\r\n")
        cert.write_text("half a certificate")
        soon(lambda: "stays as it was" in server.said)
        assert server.ask("GET", "/ready").status == 200
        subprocess.run([*make, "-out", cert, "-keyout", key], check=True, capture_output=True)
        soon(lambda: "read again" in server.said)
        with pytest.raises(ssl.SSLCertVerificationError):
            server.ask("GET", "/ready")
        server.tls = ssl.create_default_context(cafile=cert)
        server.tls.check_hostname = False
        assert server.ask("GET", "/ready").status == 200
        assert "secret" not in server.said


def test_an_engine_process_that_dies_comes_back_and_ends_at_once_when_asked_twice(tmp_path):
    with serving(tmp_path, *TWIN, "-o", tmp_path / "out") as server:
        one_that_is_stopped_is_noticed(server)
        with Stream(server) as stream:
            assert len(stream.words(2)) == 2
            server.process.send_signal(signal.SIGSTOP)  # so that nothing is started again before it was looked at
            os.kill(server.processes()["engine"][0], signal.SIGKILL)
            *_, last, done = stream
            assert json.loads(last)["error"]["code"] == 503 and done == b"[DONE]"
            assert server.ask("GET", "/health").status == 503
            assert server.ask("GET", "/ready").status == server.complete().status == 503
            server.process.send_signal(signal.SIGCONT)
        soon(lambda: server.ask("GET", "/ready").status == 200)
        asked_twice_it_ends_at_once(server)
    for name, status in (("out", "interrupted"), ("out-2", "complete")):  # nothing that was recorded is lost
        recording = Recording.load(tmp_path / name)
        (row,) = recording.requests.to_pylist()
        assert (recording.run["status"], recording.run["run_id"]) == (status, name)
        assert row["status"] == "unfinished" and len(recording.steps) > 2
    assert f"the recording goes on in {tmp_path / 'out-2'}" in server.said


def one_that_is_stopped_is_noticed(server):
    (engine,) = server.processes()["engine"]
    os.kill(engine, signal.SIGSTOP)
    soon(lambda: server.ask("GET", "/health").status == 503)
    assert server.complete().status == 503
    os.kill(engine, signal.SIGCONT)
    soon(lambda: server.ask("GET", "/health").status == 200)


def asked_twice_it_ends_at_once(server):
    with Stream(server) as stream:
        stream.words(2)
        server.process.send_signal(signal.SIGTERM)
        soon(lambda: server.ask("GET", "/ready").status == 503)
        server.process.send_signal(signal.SIGTERM)
        *_, last, done = stream
        assert done == b"[DONE]" and json.loads(last)["choices"][0]["finish_reason"] == "abort"
        assert server.process.wait(60) == 0


def test_an_api_process_that_dies_comes_back_and_the_end_waits_for_what_is_under_way(tmp_path):
    recorded = tmp_path / "out"
    with serving(tmp_path, *TWIN, "-o", recorded) as server:
        with Stream(server) as stream:
            stream.words(2)
            os.kill(server.processes()["api"][0], signal.SIGKILL)
            soon(lambda: answered(server))
        with Stream(server, {**LONG, "max_tokens": 300}) as stream:
            stream.words(2)
            for pid in [server.process.pid, *chain(*server.processes().values())]:  # as a container does
                os.kill(pid, signal.SIGTERM)
            soon(lambda: server.ask("GET", "/ready").status == 503)
            assert server.complete().status == 503
            *_, last, done = stream
            assert done == b"[DONE]" and json.loads(last)["choices"][0]["finish_reason"] == "length"
            assert server.process.wait(60) == 0
    first, *others = sorted(Recording.load(recorded).requests.to_pylist(), key=lambda row: row["request_id"])
    assert (first["status"], first["reason"]) == ("cancelled", "its API process has ended")
    assert others and {row["status"] for row in others} == {"finished"}


def test_processes_end_with_their_supervisor_and_the_recording_is_whole(tmp_path):
    with serving(tmp_path, *TWIN, "-o", tmp_path / "out", ends=-signal.SIGKILL) as server:
        pids = list(chain(*server.processes().values()))
        with Stream(server) as stream:
            stream.words(2)
            server.process.kill()
            *_, last, done = stream
            assert done == b"[DONE]" and json.loads(last)["choices"][0]["finish_reason"] == "abort"
        soon(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    (row,) = Recording.load(tmp_path / "out").requests.to_pylist()
    assert row["status"] == "unfinished" and row["output_tokens"] >= 2


def test_a_full_disk_ends_the_recording_and_not_the_service(tmp_path):
    with ExitStack() as stack:
        with disk_of(40_000):
            server = stack.enter_context(serving(tmp_path, *TWIN, "--speed", 1000, "-o", tmp_path / "out"))
        for at in range(3):
            assert server.complete(prompt=[5 + at] * 3000, max_tokens=3000, ignore_eos=True).status == 200
    assert "the recording ends here" in server.said and "Traceback" not in server.said
    assert not list((tmp_path / "out").glob("*.parquet"))
    recover(tmp_path / "out")  # there is room again
    assert Recording.load(tmp_path / "out").steps.num_rows > 100


class FullDisk:
    """A writer of recordings whose disk has no more room after `rows` rows."""

    def __init__(self, path, rows):
        self.workload_path = path / "workload.parquet"
        self.discarded = False
        self._rows = rows

    def _write(self, **row):
        self._rows -= 1
        if self._rows < 0:
            raise UserError("recording", "a disk", "cannot be written: No space left on device")

    add_request = add_step = _write

    def discard(self):
        self.discarded = True


def test_a_recording_that_cannot_be_written_is_given_up_once(tmp_path, caplog):
    writer = FullDisk(tmp_path, 3)
    recording = LiveRecording(writer)
    for id in range(20):
        recording.arrived(WorkloadRequest(id, id, (("", 5),), 3))
        recording.add_step({})
        recording.add_request({"request_id": id, "status": "finished", "reason": "", "output_tokens": 3})
    recording.close()
    assert writer.discarded and caplog.text.count("the recording ends here") == 1


HANGS = """
import time
from pathlib import Path
from tokentwin.serving.policies.vllm import VllmScheduler
from tokentwin.serving.user_code import call_limit

call_limit.CALL_LIMIT_S = 0.3

class Hangs(VllmScheduler):
    def step_budget(self):
        while Path(__file__).with_name("hangs").exists():
            time.sleep(0.01)
        return super().step_budget()
"""


def test_an_engine_whose_policy_hangs_is_started_again(tmp_path):
    (tmp_path / "mine.py").write_text(HANGS)
    hangs = tmp_path / "hangs"
    with serving(tmp_path, *TWIN, "--policy", f"{tmp_path}/mine.py:Hangs") as server:
        hangs.touch()
        assert server.complete().status >= 500
        hangs.unlink()
        soon(lambda: answered(server))
        assert "call: 'schedule()': has not returned after 0.3 s, the limit of one call" in server.said
        assert "the process engine has ended (exit code 2); it is started again" in server.said
