"""A server that is asked to end before it serves does end."""

from multiprocessing import Pipe
from pathlib import Path

from tokentwin.apiserver.processes import Engine
from tokentwin.apiserver.settings import ServeSettings
from tokentwin.apiserver.supervisor import _Supervisor
from tokentwin.serving.deployments.config import Deployment
from tokentwin.traces.live_recording import Place


def test_a_model_that_still_loads_is_not_waited_for_once_the_server_is_to_end(tmp_path: Path) -> None:
    engine = Engine(ServeSettings(), Deployment(), Place(None), f"ipc://{tmp_path}/engine")
    supervisor = _Supervisor(engine, [], print)
    told, _tells = Pipe(duplex=False)
    supervisor._stop(15, None)
    assert supervisor._await_engine(told) == ""
