"""Record vLLM's scheduler on a virtual clock: `python -m tests.vllm.record_scheduler OUT SCENARIO.json ...`.

Needs an interpreter that can import vllm; no model runs. A scenario is one of `lab.oracles.vllm_clock`; its recording
goes to the directory of its name in OUT.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path

from lab.oracles import vllm_clock
from tokentwin.vllmside.recording_scheduler import RecordingScheduler


def main(out: Path, paths: list[Path]) -> None:
    made: list[RecordingScheduler] = []

    def recording(*args: object, **kwargs: object) -> RecordingScheduler:
        made.append(RecordingScheduler(*args, **kwargs))
        return made[-1]

    vllm_clock.Scheduler = vllm_clock.AsyncScheduler = recording  # type: ignore[misc, assignment]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(vllm_clock._MODEL))
        for path in paths:
            os.environ["TOKENTWIN_RECORD"] = str(out / path.stem)
            try:
                vllm_clock.record(json.loads(path.read_text()), folder)
            except Exception as error:  # what vLLM refuses or cannot end is recorded as far as it goes
                print(path.stem, repr(error)[:200])
            while made:
                made.pop().shutdown()
            gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
