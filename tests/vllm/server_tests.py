"""vLLM's own tests of its server, against the URL of another server.

    python -m tests.vllm.server_tests CHECKOUT chat URL --model NAME --tokenizer FOLDER --python PYTHON

CHECKOUT is vLLM's source tree, for example its source distribution from PyPI. PYTHON has vllm, pytest and
pytest-asyncio. A copy of the test file runs in a temporary folder, where `RemoteOpenAIServer` is a stand-in that starts
nothing. Tests that never talk to a server are left out, and those with an adapter unless `--adapter` names one.
lab/results/clients.md has the results.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

_FILES = {"completion": "completion/test_completion.py", "chat": "chat_completion/test_chat.py"}
_PLUGIN = """
def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if "server" in item.fixturenames]
"""
_STAND_IN = """
import os
import openai
import vllm.tokenizers
from transformers import AutoTokenizer

vllm.tokenizers.get_tokenizer = lambda tokenizer_name, **options: AutoTokenizer.from_pretrained(os.environ["TOKENIZER"])


class RemoteOpenAIServer:
    def __init__(self, *arguments, **options):
        self.root = os.environ["SERVER"]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def url_for(self, *parts):
        return "/".join([self.root, *parts])

    def get_async_client(self, **options):
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key="-", max_retries=0, **options)
"""


def main() -> int:
    """Run the tests and return pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("file", choices=_FILES)
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--adapter", default="")
    given = parser.parse_args()
    with TemporaryDirectory() as place:
        tests = Path(place) / "tests"
        tests.mkdir()
        (tests / "__init__.py").touch()
        (tests / "utils.py").write_text(_STAND_IN)
        source = given.checkout / "tests" / "entrypoints"
        (tests / "conftest.py").write_text((source / "conftest.py").read_text() + _PLUGIN)
        text = (source / "openai" / _FILES[given.file]).read_text()
        text = re.sub(r'^MODEL_NAME = ".*"$', f'MODEL_NAME = "{given.model}"', text, flags=re.MULTILINE)
        text = text.replace("HuggingFaceH4/zephyr-7b-beta", given.model)
        text = text.replace("def server(zephyr_lora_files)", "def server()").replace("{zephyr_lora_files}", "")
        text = text.replace("zephyr-lora", given.adapter or "zephyr-lora")
        (tests / Path(_FILES[given.file]).name).write_text(text)
        options = ["-q", "-rf", "--tb=line", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
        options += [] if given.adapter else ["-k", "not zephyr-lora"]
        variables = {**os.environ, "SERVER": given.url.rstrip("/"), "TOKENIZER": str(given.tokenizer)}
        return subprocess.run([given.python, "-m", "pytest", *options, str(tests)], cwd=place, env=variables).returncode


if __name__ == "__main__":
    sys.exit(main())
