"""Every kernel compiled for sm_90 and sm_100 as it is launched, without a GPU; the page that says what came out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels are compiled by Triton, which is not installed")
pytest.importorskip("torch")

from lab.gpu_suite import aot
from tokentwin.realengine.kernels.row_operations import specialisations

REPOSITORY = Path(__file__).parents[2]
USED = aot.Resources(4, 1, 64, 0, 0, 0, {"ld.global.v4.b32": 2, "griddepcontrol": 1, "wgmma": 0, "cp.async": 0})


def compiled(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "lab.gpu_suite.aot", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=kept | environment, capture_output=True, text=True)


# The first specialisation of each kernel.
ONE_EACH = """
import sys
from lab.gpu_suite import aot
from tokentwin.realengine.kernels.launches import COMPILED_FOR
COMPILED_FOR.set(divmod(int(sys.argv[1]), 10))
first = {spec.kernel: spec for spec in reversed(aot.specialisations())}.values()
reports = [(spec, aot.compile_report(spec)) for spec in first]
assert not [fault for spec, used in reports for fault in aot.faults(spec, used)]
print(len(reports))
"""


@pytest.mark.aot
@pytest.mark.parametrize("arch", aot.ARCHITECTURES)
def test_a_kernel_of_each_sort_is_within_its_limits(arch: int) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", ONE_EACH, str(arch)]
    done = subprocess.run(command, cwd=REPOSITORY, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > len(aot.MODULES)


@pytest.mark.aot
@pytest.mark.deep
def test_every_kernel_is_within_its_limits_and_as_the_page_says() -> None:
    """A minute and a half of compiling, where Triton has not compiled them before."""
    done = compiled("--check", "docs/kernels.md")
    assert done.returncode == 0, done.stderr


@pytest.mark.aot
@pytest.mark.deep
def test_every_kernel_is_within_its_limits_on_blackwell() -> None:
    done = compiled("--arch", "100")
    assert done.returncode == 0, done.stderr


def test_every_module_that_names_specialisations_is_compiled() -> None:
    modules = (REPOSITORY / "realengine" / "kernels").glob("*.py")
    named = {path.stem for path in modules if "\ndef specialisations()" in path.read_text()}
    assert named == set(aot.MODULES)


@pytest.mark.parametrize(
    ("used", "fault"),
    [
        (USED._replace(registers=65), "65 registers, at most 64 are allowed"),
        (USED._replace(tensor_columns=520), "520 columns of tensor memory, at most 512 are allowed"),
        (USED._replace(stack_bytes=8, spill_bytes=16), "8 bytes of stack, 16 bytes of spills"),
        (USED._replace(counts={**USED.counts, "ld.global.v4.b32": 0}), "no ld.global.v4.b32 in its PTX"),
    ],
)
def test_a_fault_names_the_kernel_and_what_is_wrong(used: aot.Resources, fault: str) -> None:
    spec = next(specialisations())
    assert aot.faults(spec, used) == [f"{spec.name}: {fault}"]
    assert aot.faults(spec, USED) == []


def test_a_page_with_another_table_is_a_fault_unless_another_compiler_made_it(tmp_path, monkeypatch):
    spec = next(specialisations())
    monkeypatch.setattr(aot, "specialisations", lambda: [spec])
    monkeypatch.setattr(aot, "compile_report", lambda spec: USED)
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- begin: made by python -m lab.gpu_suite.aot --write -->\n<!-- end -->\nAfter.\n")
    check = ["--check", str(page)]
    assert aot.main(check) == 1
    assert aot.main(["--write", str(page)]) == 0
    assert aot.main(check) == 0
    page.write_text(page.read_text().replace("| 64 |", "| 63 |", 1))
    assert aot.main(check) == 1
    page.write_text(page.read_text().replace("Triton ", "Triton 3.5."))
    assert aot.main(check) == 0
    assert page.read_text().startswith("Before.\n<!--") and page.read_text().endswith("-->\nAfter.\n")


def test_nothing_is_compiled_under_the_interpreter() -> None:
    done = compiled(TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr
