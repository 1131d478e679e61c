"""Tries the wheel of dist/ in empty environments: `python -m tests.release` (`make release-check`).

For each Python from 3.11 to 3.14 on this machine and each torch of TORCH whose wheel has no CUDA:
install, `mend version`, `mend demo --quick`, and the tests of TESTS against the installed
package. Prints one line per combination; those that were not run say why. Ends with 1 where one
fails or none was run, and writes build/sbom.json of the first environment.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLACE = ROOT / ".venv-release"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCH = ("torch==2.6.*", "torch==2.10.*", "the pinned", "torch")
"""The lowest supported, an older one, that of constraints.txt, and the newest that pip finds."""

TESTS = ("unit/codec", "unit/compat", "unit/config", "unit/fragment", "unit/outer")
"""Folders of tests that need the package alone."""

NEEDED = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Its output. Raises RuntimeError with it."""
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}")
    return done.stdout


def python_named(version: str) -> str | None:
    """A Python of this version that runs: pyenv's shims may stand for none."""
    found = shutil.which(f"python{version}")
    good = found and subprocess.run([found, "-c", ""], capture_output=True, check=False)
    return found if good and good.returncode == 0 else None


def why_not(python: Path, requirement: str, report: Path) -> str:
    """Why the torch that pip would install is not run here; empty: it has a wheel without CUDA."""
    asked = [python, "-m", "pip", "install", "-q", "--dry-run", "--only-binary", ":all:"]
    try:
        run(*asked, "--report", report, requirement)
    except RuntimeError:
        return "pip finds no wheel"
    names = [each["metadata"]["name"] for each in json.loads(report.read_text())["install"]]
    return "its wheel is for CUDA" if any(name.startswith("nvidia") for name in names) else ""


def constraints(torch: str, folder: Path) -> tuple[Path, str]:
    """Those of the repository, and the torch; another one than theirs brings its own packages."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    if torch == "the pinned":
        torch = next(line for line in lines if line.startswith("torch=="))
    else:
        own = re.compile("(torch|sympy|mpmath|networkx|filelock|fsspec|typing_extensions)==")
        lines = [line for line in lines if not own.match(line)]
    (folder / "constraints.txt").write_text("\n".join(lines))
    return folder / "constraints.txt", torch


def tried(version: str, torch: str, wheel: Path, folder: Path) -> str:
    """What became of the wheel in an empty environment. Raises RuntimeError where a step fails."""
    if (found := python_named(version)) is None:
        return "not run: no such Python here"
    folder.mkdir(parents=True)
    pinned, torch = constraints(torch, folder)
    run(found, "-m", "venv", folder / "env")
    python = folder / "env/bin/python"
    if reason := why_not(python, torch, folder / "report.json"):
        return f"not run: {reason}"
    begin = time.monotonic()
    install = (python, "-m", "pip", "install", "-q", "-c", pinned)
    run(*install, torch, wheel)
    mend = folder / "env/bin/mend"
    line = run(mend, "version", cwd=folder).strip()
    run(mend, "demo", "--quick", "--out", folder / "demo", cwd=folder)
    run(*install, *NEEDED)
    where = run(python, "-c", "import mend; print(mend.__file__)").strip()
    if not where.startswith(str(folder)):
        raise RuntimeError(f"the tests would be of {where}")
    tests = [ROOT / "tests" / each for each in TESTS]
    told = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests).splitlines()[-1]
    return f"ran in {time.monotonic() - begin:.0f} s: {line}; {told}"


def main() -> int:
    (wheel,) = (ROOT / "dist").glob("*.whl")
    shutil.rmtree(PLACE / "tries", ignore_errors=True)
    ran, failed = [], False
    for version in PYTHONS:
        for torch in TORCH:
            folder = PLACE / "tries" / f"{version}-{TORCH.index(torch)}"
            try:
                told = tried(version, torch, wheel, folder)
            except RuntimeError as error:
                told, failed = f"FAILED: {error}", True
            print(f"python {version}, {torch}: {told}", flush=True)
            if told.startswith("ran"):
                ran.append(folder)
    if ran:
        sbom = ROOT / "build/sbom.json"
        sbom.parent.mkdir(exist_ok=True)
        tool = PLACE / "bin/cyclonedx-py"
        run(tool, "environment", "--output-file", sbom, ran[0] / "env/bin/python")
    return int(failed or not ran)


if __name__ == "__main__":
    sys.exit(main())
