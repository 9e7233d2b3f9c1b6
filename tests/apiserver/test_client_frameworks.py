"""Frameworks that talk to servers of OpenAI's API, each in an environment of its own, against a twin."""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apiserver.served import TWIN, Server, serving
from tests.vllm.environment import PYTHON, environment, needs_vllm

pytestmark = pytest.mark.deep
MODEL = "served"
SCRIPTS = {
    "openai": """
from openai import OpenAI
client = OpenAI(base_url=URL, api_key="-")
assert client.models.retrieve(MODEL).id == MODEL
with client.responses.stream(model=MODEL, input="Hello", max_output_tokens=9) as stream:
    assert [event.type for event in stream][-1] == "response.incomplete"  # after 9 tokens
class Person(BaseModel):
    name: str
    age: int
asked = [{"role": "user", "content": "Who?"}]
answer = client.chat.completions.parse(model=MODEL, messages=asked, response_format=Person, temperature=0)
assert isinstance(answer.choices[0].message.parsed, Person)
""",
    "litellm": """
import litellm
asked = [{"role": "user", "content": "Hello"}]
how = {"model": "openai/" + MODEL, "api_base": URL, "api_key": "-", "messages": asked, "max_tokens": 9}
assert litellm.completion(**how).choices[0].message.content.strip()
assert "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**how, stream=True)).strip()
""",
    "instructor": """
import instructor
from openai import OpenAI
class Person(BaseModel):
    name: str
    age: int
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    client = instructor.from_openai(OpenAI(base_url=URL, api_key="-"), mode=mode)
    asked = [{"role": "user", "content": "Who?"}]
    person = client.chat.completions.create(model=MODEL, messages=asked, response_model=Person, max_retries=0)
    assert isinstance(person, Person)
""",
    "pydantic-ai-slim[openai]": """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
class Person(BaseModel):
    name: str
    age: int
model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="-"))
assert isinstance(Agent(model, output_type=Person).run_sync("Who?").output, Person)
""",
    "openai-agents": """
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)
model = OpenAIResponsesModel(model=MODEL, openai_client=AsyncOpenAI(base_url=URL, api_key="-"))
class Person(BaseModel):
    name: str
    age: int
agent = Agent(name="a", instructions="Answer.", model=model, output_type=Person)
assert isinstance(Runner.run_sync(agent, "Who?").final_output, Person)
""",
    "langchain-openai": """
from langchain_openai import ChatOpenAI
class Person(BaseModel):
    name: str
    age: int
chat = ChatOpenAI(model=MODEL, base_url=URL, api_key="-", max_tokens=99)
assert chat.invoke("Hello").content.strip() and "".join(part.text for part in chat.stream("Hello")).strip()
assert isinstance(chat.with_structured_output(Person).invoke("Who?"), Person)
""",
    "llama-index-llms-openai-like": """
from llama_index.llms.openai_like import OpenAILike
llm = OpenAILike(model=MODEL, api_base=URL, api_key="-", is_chat_model=True, max_tokens=9)
assert llm.complete("Hello").text.strip() and "".join(part.delta for part in llm.stream_complete("Hello")).strip()
""",
    "smolagents[openai]": """
from smolagents import OpenAIServerModel
model = OpenAIServerModel(MODEL, api_base=URL, api_key="-", max_tokens=9)
assert model.generate([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]).content.strip()
""",
    "llm": """
import os, pathlib
os.environ["LLM_USER_PATH"] = home = os.environ["HOME"]
known = f'[{{"model_id": "twin", "model_name": "{MODEL}", "api_base": "{URL}"}}]'
pathlib.Path(home, "extra-openai-models.yaml").write_text(known)
import llm
model = llm.get_model("twin")
assert model.prompt("Hello", stream=False, key="-", max_tokens=9).text().strip()
assert "".join(model.prompt("Hello", key="-", max_tokens=9)).strip()
""",
    "locust": """
import gevent
from locust import HttpUser, task
from locust.env import Environment
class Asker(HttpUser):
    host = URL
    @task
    def ask(self):
        asked = [{"role": "user", "content": "Hello"}]
        self.client.post("/chat/completions", json={"model": MODEL, "messages": asked, "max_tokens": 9})
runner = Environment(user_classes=[Asker]).create_local_runner()
runner.start(4, spawn_rate=4)
gevent.sleep(5)
runner.quit()
assert runner.stats.total.num_requests and not runner.stats.total.num_failures
""",
    "anthropic": """
from anthropic import Anthropic
client = Anthropic(base_url=URL.removesuffix("/v1"), api_key="-")
asked = {"model": MODEL, "max_tokens": 99, "messages": [{"role": "user", "content": "Hello"}]}
assert client.messages.create(**asked).stop_reason == "max_tokens"
schema = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"], "additionalProperties": False}
tool = {"name": "look", "input_schema": schema}
with client.messages.stream(**asked, tools=[tool], tool_choice={"type": "tool", "name": "look"}) as stream:
    (call,) = stream.get_final_message().content
assert list(call.input) == ["q"]
""",
}


# What the command `vllm bench serve` calls; that command itself needs a package of the name `vllm`.
VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--speed", 100, "--served-model-name", MODEL)
    with serving(tmp_path_factory.mktemp("twin"), *TWIN, *options) as server:
        yield server


def python_with(package: str) -> Path:
    """Return the Python of an environment that is made once and kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    home = cache / "tokentwin" / f"{package}-py{sys.version_info.major}.{sys.version_info.minor}"
    if not (home / "installed").exists():
        venv.create(home, with_pip=True)
        command = [home / "bin" / "pip", "install", "-q", package, "pydantic"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{package} cannot be installed here: {done.stderr.splitlines()[-1]}")
        (home / "installed").touch()
    return home / "bin" / "python"


@pytest.mark.parametrize("package", SCRIPTS)
def test_a_framework_gets_what_it_asks_for(server: Server, package: str, tmp_path: Path) -> None:
    script = f"from pydantic import BaseModel\nURL, MODEL = {server.url!r}, {MODEL!r}\n{SCRIPTS[package]}"
    quiet = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "OTEL_SDK_DISABLED": "true"}
    ran = subprocess.run([python_with(package), "-c", script], capture_output=True, text=True, env=quiet, timeout=300)
    assert ran.returncode == 0, ran.stderr[-4000:]


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_vllms_own_benchmark_completes_every_request(server: Server, backend: str, path: str, tmp_path: Path) -> None:
    from tokentwin.planning.home import home
    from tokentwin.realengine.models.smollm2 import fetch

    lengths = ("--random-input-len", 32, "--random-output-len", 8, "--num-prompts", 20)
    command = [PYTHON, "-c", VLLM_BENCH_SERVE, "--backend", backend, "--endpoint", path]
    command += ["--base-url", server.url.removesuffix("/v1"), "--model", MODEL, "--tokenizer", fetch(home())]
    command += ["--dataset-name", "random", *lengths, "--save-result", "--result-dir", tmp_path]
    quiet = environment() | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    ran = subprocess.run([*map(str, command)], capture_output=True, text=True, env=quiet)
    assert ran.returncode == 0, ran.stderr[-4000:]
    (result,) = (json.loads(file.read_text()) for file in tmp_path.glob("*.json"))
    assert (result["completed"], result["total_output_tokens"]) == (20, 160)
