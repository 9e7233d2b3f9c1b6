"""Random scenarios, decided by vLLM itself where `.venv-vllm` has it."""

import os

import pytest

from sim.live_conformance import conform_live, find_vllm
from tests.vllm.environment import PYTHON

SCENARIOS = int(os.environ.get("TOKENTWIN_VLLM_SCENARIOS", "10"))
