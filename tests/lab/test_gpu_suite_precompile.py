"""The precompile phase without a GPU: what one process compiles another finds, and every launch can be prepared."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("triton", reason="triton is not installed (Linux on x86_64 only)")

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]

CASES = """
import json, torch
from lab.gpu_suite.attention_operations import attention
from lab.gpu_suite.operations import On, add_rms_norm, argmax, silu_mul
from tokentwin.realengine.kernels.launches import Shape

def cases(device):
    bf16 = torch.bfloat16
    shape, on = Shape("small", 4, 2, 64, bf16, bf16, 16), On(device, "triton")
    return [
        add_rms_norm(on, 3, 576),
        argmax(on, 4, 4096),
        attention(on, shape, [(20, 1), (5, 1)], 64, checked=True),
        add_rms_norm(on, 3, 576, fp8=True),
        silu_mul(on, 3, 64, fp8=True),
    ]
"""
FILL = """
import multiprocessing
from functools import partial
from lab.gpu_suite.precompile import Shared, compile_launches, run_once
Array = multiprocessing.Array
shared = Shared(Array("b", 100), Array("b", 1 << 16), Array("i", 1))
rows = []
compile_launches([partial(run_once, c) for c in cases(torch.device("meta"))], shared, rows.append)
print(json.dumps(rows))
"""
# The JIT as a launch uses it, on real tensors, up to where it would hand the kernel to a GPU.
LAUNCH = """
import triton
from lab.gpu_suite.precompile import run_once
from lab.gpu_suite.aot import compile_only
compile_only()
rows = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: rows.append([src.name, cache_hit])
cpu = torch.device("cpu")
for case in [*cases(cpu), add_rms_norm(On(cpu, "triton"), 3, 592)]:
    run_once(case)
print(json.dumps(rows))
"""


def run(script: str, cache: Path, **more: str) -> list:  # type: ignore[type-arg]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | more
    done = subprocess.run(
        [sys.executable, "-c", CASES + script],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.deep
def test_what_is_compiled_ahead_is_what_a_launch_looks_for(tmp_path: Path) -> None:
    filled = run(FILL, tmp_path)
    assert [row["cached"] for row in filled] == [False] * 7  # argmax and attention are two each
    *launched, other = run(LAUNCH, tmp_path)
    assert launched == [["_" + row["kernel"], True] for row in filled]
    assert other == ["_add_rms_norm", False]  # another size is another kernel


@pytest.mark.deep
def test_the_modules_that_launch_kernels_are_built_ahead(tmp_path: Path) -> None:
    """Triton 3.6 has one for each signature, 3.7 one for all. A library of empty functions stands for the driver's."""
    import triton

    driver = (Path(triton.__file__).parent / "backends" / "nvidia" / "driver.c").read_text()
    names = sorted(set(re.findall(r"\bcu[A-Z]\w+(?=\()", driver)))
    (tmp_path / "cuda.c").write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in names))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "cuda.c"], check=True)
    rows = run(FILL, tmp_path / "cache", TRITON_LIBCUDA_PATH=str(tmp_path), LD_LIBRARY_PATH=str(tmp_path))
    launchers = [row for row in rows if "launcher" in row]
    kernels = [row for row in rows if "kernel" in row]
    assert len(rows) == len(kernels) + len(launchers) and len(kernels) == 7
    assert 3 <= len(launchers) == len({row["launcher"] for row in launchers}) <= len(kernels)
    built = [path.name.split(".")[0] for path in (tmp_path / "cache").rglob("*.so")]
    assert "cuda_utils" in built
    assert built.count("__triton_launcher") in (0, len(launchers))


@pytest.mark.deep
def test_every_launch_of_a_gpu_run_can_be_prepared(tmp_path: Path) -> None:
    """With no claim left to make nothing is compiled. Both models' attention is among them; of the numbers of decode
    rows the fewest, the most, and one between are enough."""
    script = """
import triton
from lab.gpu_suite import precompile
from lab.gpu_suite.precompile import Shared, compile_launches, launches
from lab.gpu_suite.sizes import gpu_sizes
from triton.runtime.jit import JITFunction
from tokentwin.realengine.kernels import paged_attention
seen, rows = set(), []
precompile.DECODE_BUCKETS = (1, 64, 256)
part = paged_attention._attention_part
run = part.run
def noted(*arguments, **options):
    if not options["PREFILL"]:
        seen.add((options["HEADS"], options["KV_HEADS"], str(arguments[1].dtype)))
    return run(*arguments, **options)
part.run = noted
compile_launches(launches(gpu_sizes()), Shared([], [], [0]), rows.append)
print(json.dumps([rows, list(seen)]))
"""
    failed, shapes = run(script, tmp_path)
    assert failed == []
    prepared = {tuple(shape) for shape in shapes}
    assert {(heads, 8, f"torch.{dtype}") for heads in (32, 16) for dtype in ("bfloat16", "float8_e4m3fn")} <= prepared
    assert (16, 8, "torch.float32") in prepared
    assert not list(tmp_path.rglob("*.cubin"))
