"""Builds the CPU kernels with AddressSanitizer and UndefinedBehaviorSanitizer and fuzzes them.

    python scripts/sanitize_kernels.py [--seconds N] [--seed N] [--build-directory DIR]

1. CMake configures this source tree in a temporary folder (or in --build-directory, which is kept and used again) with
   g++ -fsanitize=address,undefined, for the Python that runs this and its nanobind; ninja or make builds it. What is
   installed stays as it is.
2. tests/quantization/fuzz_kernels.py runs for --seconds (60) in a process of its own with that extension in the place
   of the installed one: every operator, whole decode steps, every instruction set of this CPU, random shapes from
   --seed, all buffers exactly as long as they are said to be, results compared with plain PyTorch.
3. A read or write outside a buffer, undefined behaviour, a wrong result or a hang is reported with the case that was
   running, and the exit status is 1. It is 0 where nothing was found, 2 where kernels could not be built.

Needs Linux, g++ with libasan, cmake (of pip or of the system), nanobind and the installed package. With two cores it
takes about two minutes. Python's own leaks are not looked at, nor what is inside PyTorch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FUZZER = ROOT / "tests" / "quantization" / "fuzz_kernels.py"
FLAGS = (
    "-O1",
    "-g1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
)
SANITIZER_OPTIONS = {
    # Not detect_stack_use_after_return: its frames are not aligned for registers of 64 bytes (GCC 12), so that correct
    # code faults.
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=99",
}


class CannotBuildError(Exception):
    pass


def tool(name: str) -> str | None:
    """Where a program is: beside this Python, where pip puts it, or on the PATH."""
    places = [sysconfig.get_path("scripts"), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return shutil.which(name, path=os.pathsep.join(places))


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuildError(f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def build(directory: Path) -> Path:
    """The extension, built with sanitizers in `directory`."""
    cmake, compiler, ninja = tool("cmake"), tool("g++"), tool("ninja")
    if cmake is None or compiler is None:
        raise CannotBuildError(f"cmake: {cmake}, g++: {compiler}; both are needed")
    nanobind = run(sys.executable, "-m", "nanobind", "--cmake_dir").strip()
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else ["-G", "Unix Makefiles"]
    run(
        cmake,
        *generator,
        "-S",
        str(ROOT),
        "-B",
        str(directory),
        "-DCMAKE_BUILD_TYPE=None",
        f"-DCMAKE_CXX_COMPILER={compiler}",
        f"-DCMAKE_CXX_FLAGS={' '.join(FLAGS)}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dnanobind_DIR={nanobind}",
    )
    run(cmake, "--build", str(directory), "--parallel", str(len(os.sched_getaffinity(0))))
    built = sorted(directory.glob("_kernels*.so"))
    if len(built) != 1:
        raise CannotBuildError(f"{directory}: expected one _kernels*.so, found {len(built)}")
    return built[0]


def fuzz(extension: Path, seconds: float, seed: int, log: Path) -> bool:
    """Whether nothing was found."""
    sanitizer = run("g++", "-print-file-name=libasan.so").strip()
    environment = os.environ | SANITIZER_OPTIONS | {"LD_PRELOAD": sanitizer, "OMP_WAIT_POLICY": "PASSIVE"}
    options = ("--seconds", str(seconds), "--seed", str(seed), "--kernels", str(extension), "--log", str(log))
    outside = extension.parent  # the source tree's own hf_sparse/ lacks its sub-packages
    try:
        done = subprocess.run(
            [sys.executable, str(FUZZER), *options],
            env=environment,
            cwd=outside,
            timeout=2 * seconds + 120,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print("HANGS", file=sys.stderr)
        found = True
    else:
        found = done.returncode != 0
    if found:
        case = log.read_text().strip() if log.exists() else "none"
        print(f"FAIL: the last case was {case}\nIts command: {FUZZER} {case.partition(':')[0]}", file=sys.stderr)
    return not found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--build-directory", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hf-sparse-sanitized-") as temporary:
        directory = (arguments.build_directory or Path(temporary)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        try:
            extension = build(directory)
        except CannotBuildError as error:
            print(f"The kernels cannot be built: {error}", file=sys.stderr)
            return 2
        print(f"built {extension}", flush=True)
        passed = fuzz(extension, arguments.seconds, arguments.seed, Path(temporary) / "case")
    print("PASS: no report, no wrong result" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
