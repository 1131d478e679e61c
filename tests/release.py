"""Tries the wheel of dist/ in empty environments: `python -m tests.release` (`make release-check`).

For each Python from 3.11 to 3.14 on this machine and each torch of TORCH whose wheel has no CUDA:
install, `mend version`, `mend demo --quick`, and the tests of TESTS against the installed
package. A Python for which there is no such torch gets the package without torch, as a witness may
have it, and the tests of WITHOUT_TORCH. Prints one line per combination; those that were not run
say why. Ends with 1 where one fails, where none with torch was run, or where the changelog has no
date for the version, and writes build/sbom.json of the first environment.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PLACE = ROOT / ".venv-release"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PINNED, NONE = "the pinned torch", "without torch"
TORCH = ("torch==2.6.*", "torch==2.10.*", PINNED, "torch")
"""The lowest supported, an older one, that of constraints.txt, and the newest that pip finds."""

TESTS = ("unit/codec", "unit/compat", "unit/config", "unit/fragment", "unit/outer")
"""Folders of tests that need the package alone."""

WITHOUT_TORCH = ("unit/consensus", "unit/events", "unit/transport")
"""Folders of tests of what a witness runs."""

WITH_FIXTURES = ("--ignore-glob", "*/test_probe.py", "--ignore-glob", "*/test_status_client.py")
"""Less those that need conftest.py, which loads torch."""

NEEDED = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis")
METRICS = "prometheus-client"
"""What one of TESTS needs besides: the extra metrics."""


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
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for found in (shutil.which(f"python{version}"), *of_pyenv):
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return str(found)
    return None


def pip(python: Path | str, *arguments: str | Path) -> None:
    """That of .venv-release, which is newer than the one that Python brings, on `python`."""
    install = ("-m", "pip", "--python", python, "install", "-q", "--no-compile")
    run(PLACE / "bin/python", *install, *arguments)


def why_not(python: str, requirement: str, report: Path) -> str:
    """Why the torch that pip would install is not run here; empty: it has a wheel without CUDA.

    With fast-deps pip reads the requirements alone out of a wheel of 900 MB.
    """
    asked = ("--dry-run", "--no-deps", "--only-binary", ":all:", "--use-feature", "fast-deps")
    try:
        pip(python, *asked, "--ignore-installed", "--report", report, requirement)
    except RuntimeError:
        return "pip finds no wheel"
    (found,) = json.loads(report.read_text())["install"]
    needs = map(Requirement, found["metadata"].get("requires_dist", ()))
    for_here = [each.name for each in needs if not each.marker or each.marker.evaluate()]
    cuda = any(name.startswith(("nvidia-", "cuda-")) for name in for_here)
    return f"the wheel of {found['metadata']['version']} is for CUDA" if cuda else ""


def constraints(torch: str) -> tuple[list[str], str]:
    """Those of the repository, and the torch; another one than theirs brings its own packages."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    if torch == PINNED:
        return lines, next(line for line in lines if line.startswith("torch=="))
    own = re.compile("(torch|sympy|mpmath|networkx|filelock|fsspec|typing_extensions)==")
    return [line for line in lines if not own.match(line)], torch


def environment(found: str, folder: Path, lines: list[str]) -> tuple[Path, Path]:
    """An empty one in `folder`: its Python, and the file of constraints."""
    folder.mkdir(parents=True)
    (folder / "constraints.txt").write_text("\n".join(lines))
    run(found, "-m", "venv", "--without-pip", folder / "env")
    return folder / "env/bin/python", folder / "constraints.txt"


def tests_of(folder: Path, tests: tuple[str, ...], *options: str) -> str:
    """What pytest says of them at last; they must be those of the installed package."""
    python = folder / "env/bin/python"
    where = run(python, "-c", "import mend; print(mend.__file__)").strip()
    if not where.startswith(str(folder)):
        raise RuntimeError(f"the tests would be of {where}")
    paths = [ROOT / "tests" / each for each in tests]
    quiet = ("-q", "-p", "no:cacheprovider", *options)
    return run(python, "-m", "pytest", *quiet, *paths).splitlines()[-1]


def tried(found: str, torch: str, wheel: Path, folder: Path) -> str:
    """What came of the wheel in an empty environment. Raises RuntimeError where a step fails."""
    begin = time.monotonic()
    lines, torch = constraints(torch)
    python, pinned = environment(found, folder, lines)
    pip(python, "-c", pinned, torch, wheel)
    line = run(folder / "env/bin/mend", "version", cwd=folder).strip()
    run(folder / "env/bin/mend", "demo", "--quick", "--out", folder / "demo", cwd=folder)
    demo = time.monotonic()
    pip(python, "-c", pinned, *NEEDED, METRICS)
    counted = tests_of(folder, TESTS, "--shard", "0")
    end = time.monotonic()
    return f"ran in {end - begin:.0f} s, {end - demo:.0f} of them tests: {line}; {counted}"


def tried_without_torch(found: str, wheel: Path, folder: Path) -> str:
    """The same without torch. Raises RuntimeError where a step fails."""
    begin = time.monotonic()
    python, pinned = environment(found, folder, constraints("")[0])
    pip(python, "-c", pinned, "--no-deps", wheel)
    with ZipFile(wheel) as packed:
        name = next(each for each in packed.namelist() if each.endswith("/METADATA"))
        metadata = HeaderParser().parsestr(packed.read(name).decode())
    needs = [each for each in metadata.get_all("Requires-Dist", ()) if "extra ==" not in each]
    others = [each for each in needs if Requirement(each).name != "torch"]
    pip(python, "-c", pinned, *others, *NEEDED)
    (package,) = folder.glob("env/lib/python*/site-packages/mend")
    run(python, "-W", "error", "-m", "compileall", "-q", "-f", package)
    line = run(folder / "env/bin/mend", "version", cwd=folder).strip()
    counted = tests_of(folder, WITHOUT_TORCH, "--noconftest", *WITH_FIXTURES)
    return f"ran in {time.monotonic() - begin:.0f} s: {line}; {counted}"


def tries_of(version: str, wheel: Path, folder: Path) -> dict[str, str]:
    """What came of each torch with this Python, printed as it comes."""
    if (found := python_named(version)) is None:
        print(f"python {version}: not run: no such Python here", flush=True)
        return {}
    folder.mkdir(parents=True)
    reports = [folder / f"report-{n}.json" for n in range(len(TORCH))]
    asked = [constraints(torch)[1] for torch in TORCH]
    with ThreadPoolExecutor() as pool:
        reasons = list(pool.map(why_not, [found] * len(TORCH), asked, reports))
    results = {}
    for number, (torch, reason) in enumerate(zip(TORCH, reasons, strict=True)):
        if reason:
            results[torch] = f"not run: {reason}"
        else:
            results[torch] = _or_failed(tried, found, torch, wheel, folder / str(number))
        print(f"python {version}, {torch}: {results[torch]}", flush=True)
    if all(reasons):
        results[NONE] = _or_failed(tried_without_torch, found, wheel, folder / "without")
        print(f"python {version}, {NONE}: {results[NONE]}", flush=True)
    return results


def _or_failed(trial: Callable[..., str], *arguments: object) -> str:
    try:
        return trial(*arguments)
    except RuntimeError as error:
        return f"FAILED: {error}"


def changelog_has_date(wheel: Path) -> bool:
    """Whether the version of the wheel was cut, below an empty place for the next one."""
    version = re.escape(wheel.name.split("-")[1])
    cut = rf"\n## \[Unreleased\]\n\n## \[{version}\] - \d{{4}}-\d\d-\d\d\n"
    good = re.search(cut, (ROOT / "CHANGELOG.md").read_text()) is not None
    print(f"changelog: {'has' if good else 'FAILED: has no'} date of {wheel.name}", flush=True)
    return good


def main() -> int:
    (wheel,) = (ROOT / "dist").glob("*.whl")
    good = changelog_has_date(wheel)
    tries = PLACE / "tries"
    shutil.rmtree(tries, ignore_errors=True)
    results = {version: tries_of(version, wheel, tries / version) for version in PYTHONS}
    every = [(version, torch) for version in PYTHONS for torch in results[version]]
    ran = [each for each in every if results[each[0]][each[1]].startswith("ran")]
    with_torch = [(version, torch) for version, torch in ran if torch != NONE]
    failed = any("FAILED" in results[version][torch] for version, torch in every)
    if with_torch:
        version, torch = with_torch[0]
        sbom = ROOT / "build/sbom.json"
        sbom.parent.mkdir(exist_ok=True)
        python = tries / version / str(TORCH.index(torch)) / "env/bin/python"
        run(PLACE / "bin/cyclonedx-py", "environment", "--output-file", sbom, python)
    return int(failed or not good or not with_torch)


if __name__ == "__main__":
    sys.exit(main())
