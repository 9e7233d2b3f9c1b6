"""Ahead-of-time compilation of every kernel for sm_90 or sm_100 in the form in which it is launched; no GPU is needed.

The compiler reports registers, shared memory, stack and spills. This report, and whether the PTX has the intended
instructions, decide much of a kernel's speed, so they are tested. `python -m lab.gpu_suite.aot` prints the table and
fails if a kernel is not within its limits. `--arch 100` compiles for Blackwell, whose tensor memory is limited, too.
`--write docs/kernels.md` puts the table between that page's markers, and `--check docs/kernels.md` fails if it is not
there. The command must run without TRITON_INTERPRET, because the interpreter compiles nothing.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

from tokentwin.realengine.kernels.launches import COMPILED_FOR, Specialisation
from tokentwin.serving.answers.markdown import markdown_table

MODULES = (
    "kv_splits",
    "paged_attention",
    "rope_store",
    "row_operations",
    "grouped_gemm",
    "packed_gemm",
    "router",
    "sampling",
)
ARCHITECTURES = (90, 100)
TENSOR_COLUMNS = 512  # columns of tensor memory of a multiprocessor of sm_100
_BEGIN = "<!-- begin: made by python -m lab.gpu_suite.aot --write -->"
_END = "<!-- end -->"
_COUNTED = ("wgmma", "cp.async")
_ON_BLACKWELL = {"wgmma": "tcgen05"}  # tensor-core instructions of sm_90, and those of sm_100
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Resources(NamedTuple):
    """The resources of a compiled kernel: warps, pipeline stages, registers and stack of a thread, and memory.

    Registers that did not fit are spilled to the stack: `spill_bytes` is the number of bytes of the resulting loads and
    stores. `tensor_columns` is the number of columns of tensor memory. `counts` has the number of occurrences of each
    expected string, "wgmma" and "cp.async" in the PTX; on sm_100 "wgmma" stands for "tcgen05".
    """

    warps: int
    stages: int
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    counts: dict[str, int]
    tensor_columns: int = 0


def compile_report(spec: Specialisation) -> Resources:
    """Compile `spec` for `COMPILED_FOR`, and return its resources from the machine code."""
    made: list[tuple[JITFunction, Any]] = []

    def compiling(kernel: JITFunction, grid: object) -> Callable[..., None]:
        return lambda *a, **k: made.append((kernel, kernel.run(*a, grid=grid, warmup=True, **k)))

    compile_only(compiling)
    spec.launch()
    compiled = [kernel for function, kernel in made if function is spec.kernel][spec.which]
    ptx = compiled.asm["ptx"]
    usage = _tool("cuobjdump", "-res-usage", contents=compiled.asm["cubin"])
    used = dict(re.findall(r"\b(REG|STACK):(\d+)", usage))
    registers, stack = int(used["REG"]), int(used["STACK"])
    return Resources(
        warps=compiled.metadata.num_warps,
        stages=compiled.metadata.num_stages,
        registers=registers,
        stack_bytes=stack,
        spill_bytes=_spill_bytes(ptx) if stack else 0,
        shared_bytes=compiled.metadata.shared,
        counts={text: ptx.count(_in_ptx(text)) for text in dict.fromkeys((*spec.expects, *_COUNTED))},
        tensor_columns=compiled.metadata.tmem_size,
    )


def _in_ptx(expected: str) -> str:
    return expected if _arch() == ARCHITECTURES[0] else _ON_BLACKWELL.get(expected, expected)


def _arch() -> int:
    major, minor = COMPILED_FOR.get()
    return 10 * major + minor


class _CompileOnly:
    """The part of a Triton driver that the JIT needs to compile for `COMPILED_FOR`, without using a GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", _arch(), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(launch: Callable[[JITFunction, object], Callable[..., object]] | None = None) -> None:
    """Make this process compile the kernels that it launches, and launch none.

    `launch` compiles a kernel for its grid.
    """
    triton.runtime.driver.set_active(_CompileOnly())
    JITFunction.__getitem__ = launch or (lambda kernel, grid: partial(kernel.run, grid=grid, warmup=True))


def specialisations() -> list[Specialisation]:
    """Return all specialisations of the kernels' modules, in their order."""
    modules = (importlib.import_module(f"tokentwin.realengine.kernels.{name}") for name in MODULES)
    return [spec for module in modules for spec in module.specialisations()]


def faults(spec: Specialisation, used: Resources) -> list[str]:
    """Return what is wrong with a kernel's resources, a line each."""
    broken = []
    if used.registers > spec.register_ceiling:
        broken.append(f"{used.registers} registers, at most {spec.register_ceiling} are allowed")
    if used.stack_bytes > spec.stack_ceiling:
        broken.append(f"{used.stack_bytes} bytes of stack, {used.spill_bytes} bytes of spills")
    if used.tensor_columns > TENSOR_COLUMNS:
        broken.append(f"{used.tensor_columns} columns of tensor memory, at most {TENSOR_COLUMNS} are allowed")
    broken += [f"no {text} in its PTX" for text in spec.expects if not used.counts[text]]
    return [f"{spec.name}: {fault}" for fault in broken]


def table(reports: list[tuple[Specialisation, Resources]]) -> str:
    """Return a Markdown table: the compiler's version, and a row for each kernel.

    A row has the number of compiled forms and, over these, the minimum and maximum of registers per thread, of bytes of
    shared memory, and of counts in the PTX.
    """
    lines = []
    for name, alike in groupby(reports, key=lambda report: report[0].name.split()[0]):
        rows = [
            (used.registers, spec.register_ceiling, used.shared_bytes, *(used.counts[text] for text in _COUNTED))
            for spec, used in alike
        ]
        spans = (" to ".join(map(str, sorted({min(column), max(column)}))) for column in zip(*rows, strict=True))
        lines.append((name, str(len(rows)), *spans))
    header = ("kernel", "forms", "registers", "ceiling", "shared", *map(_in_ptx, _COUNTED))
    made = markdown_table(header, lines, [False] + [True] * 6)
    return f"Triton {triton.__version__}, sm_{_arch()}.\n\n{made}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.gpu_suite.aot", description="Compile every kernel.")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table between the markers of this page")
    parser.add_argument("--check", type=Path, metavar="PAGE", help="fail if the table in this page is out of date")
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, default=90, help="90: H100, H200; 100: B200, GB200")
    options = parser.parse_args(arguments)
    COMPILED_FOR.set(divmod(options.arch, 10))
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: the interpreter compiles nothing; unset it")
    reports = [(spec, compile_report(spec)) for spec in specialisations()]
    made = table(reports)
    print(made)
    problems = [fault for spec, used in reports for fault in faults(spec, used)]
    if options.write:
        before, _, after = _parts(options.write)
        options.write.write_text(f"{before}{_BEGIN}\n{made}\n{_END}{after}")
    if options.check:
        written = _parts(options.check)[1]
        # Another compiler version allots other registers, so a table is compared only if the page names the same
        # version.
        comparable = written.splitlines()[:1] in ([], made.splitlines()[:1])
        if comparable and written != made:
            problems.append(f"{options.check}: its table is not the one above; make it with --write {options.check}")
    print(*problems, sep="\n", file=sys.stderr)
    return 1 if problems else 0


def _parts(page: Path) -> tuple[str, str, str]:
    """Return three parts of a page: before, between and after its markers."""
    before, _, rest = page.read_text().partition(_BEGIN)
    written, _, after = rest.partition(_END)
    return before, written.strip(), after


def _spill_bytes(ptx: str) -> int:
    assembler = "ptxas" if _arch() == ARCHITECTURES[0] else "ptxas-blackwell"
    report = _tool(assembler, "-v", f"-arch=sm_{_arch()}a", "-o", "/dev/null", contents=ptx.encode())
    return sum(int(number) for number in re.findall(r"(\d+) bytes spill", report))


def _tool(name: str, *options: str, contents: bytes) -> str:
    """Return the output of a CUDA tool that comes with Triton, for a file with the given `contents`."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(contents)
        file.flush()
        done = subprocess.run([_TOOLS / name, *options, file.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
