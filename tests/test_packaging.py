"""What is installed is what pyproject.toml says, and importing it does nothing but import."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import mend
from tests.map import OWNERS

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~; \[]", each, maxsplit=1)[0].lower() for each in requirements}


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower(): version for name, version in pairs}


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def test_the_version_is_the_same_everywhere() -> None:
    """src/mend/types.py has it; the build takes it from there."""
    source = PROJECT["tool"]["hatch"]["version"]
    found = re.search(source["pattern"], (ROOT / source["path"]).read_text(encoding="utf-8"))
    assert found is not None
    assert found["version"] == mend.__version__
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert f"[{mend.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {mend.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_every_dependency_is_pinned_at_or_above_its_lower_bound() -> None:
    """What is tested is allowed, and what `make` installs is what was tested."""
    pinned = constraints()
    extras = [each for extra in EXTRAS.values() for each in extra if "mend-torch[" not in each]
    for requirement in PROJECT["project"]["dependencies"] + extras:
        name, lowest = re.sub(r"\[.*\]", "", requirement.lower()).split(">=")
        assert version(pinned[name]) >= version(lowest), requirement


def test_every_package_that_mend_imports_is_a_dependency() -> None:
    names_of = ("plots", "fast", "metrics", "frameworks", "torchtitan")
    installed = {name for name in OWNERS if name not in sys.stdlib_module_names}
    extras = [each for name in names_of for each in EXTRAS[name]]
    declared = names(PROJECT["project"]["dependencies"] + extras)
    installed -= {"llvmlite"}  # comes with numba, as triton does with torch for CUDA
    renamed = {"zmq": "pyzmq", "prometheus_client": "prometheus-client"}
    assert {renamed.get(name, name) for name in installed} == declared


def test_advice_to_install_names_declared_packages_or_extras() -> None:
    """mend-torch itself is not on PyPI, so no text may send there."""
    declared = names([*PROJECT["project"]["dependencies"], *itertools.chain(*EXTRAS.values())])
    declared -= {"mend-torch"}
    declared |= {"{PACKAGE}"}  # of metrics_server.py
    advice = re.compile(r"pip install (?:-e )?'?([\w.{}-]+)(?:\\*\[(\w+))?")
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    found = [each for path in files for each in advice.findall(path.read_text("utf-8"))]
    assert len(found) > 8
    assert {name for name, _ in found} <= declared | {"."}
    assert {extra for name, extra in found if name == "."} <= EXTRAS.keys()


ALONE = """
import importlib, importlib.util, os, pkgutil, sys
folder, source = sys.argv[1:]
sys.path[:] = [folder, *(each for each in sys.path if os.path.realpath(each) != source)]
import mend
assert mend.__file__.startswith(folder), mend.__file__
assert importlib.util.find_spec("mend_lab") is None
missing = set()
for each in pkgutil.walk_packages(mend.__path__, "mend."):
    if not each.name.endswith(".__main__"):
        try:
            importlib.import_module(each.name)
        except ModuleNotFoundError as error:
            missing.add(error.name)
        except ImportError as error:
            assert "mend.compat." in str(error), error
print(sorted(missing))
sys.argv = ["mend", "--help"]
importlib.import_module("mend.tools").main()
"""


def test_the_wheel_is_mend_alone_and_works_without_the_lab(tmp_path: Path) -> None:
    """Every module is imported from a copy of what is packed, where there is no mend_lab."""
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/mend"]}
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "mend", tmp_path / "mend", ignore=ignored)
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path), str(ROOT / "src")],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    missing, _, help_text = done.stdout.partition("\n")
    optional = {"triton", "accelerate", "lightning", "ray", "torchtitan", "transformers"}
    assert set(ast.literal_eval(missing)) <= optional, "what is missing on this machine is not ours"
    assert "launch" in help_text
    for command in ("simulate", "explore", "goodput"):
        assert f" {command} " not in help_text


def test_files_that_are_no_modules_lie_in_the_package_and_so_in_the_wheel() -> None:
    package = ROOT / PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"][0]
    files = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".py"]
    others = {str(path.relative_to(package)) for path in files if "__pycache__" not in path.parts}
    assert others == {"py.typed", "tools/report/page.html.j2"}


def test_the_markers_and_the_script_are_those_the_makefile_relies_on() -> None:
    options = PROJECT["tool"]["pytest"]["ini_options"]
    markers = {each.split(":")[0].partition("(")[0] for each in options["markers"]}
    assert markers == {"gpu", "process", "slow"}
    assert options["filterwarnings"][0] == "error"
    assert PROJECT["project"]["scripts"] == {"mend": "mend.tools:main"}


def test_licence_and_notice_are_there_and_complete() -> None:
    assert "APPENDIX: How to apply the Apache License" in (ROOT / "LICENSE").read_text()
    assert (ROOT / "NOTICE").read_text(encoding="utf-8").startswith("mend\n")
    assert (ROOT / "src" / "mend" / "py.typed").exists()


def test_ci_runs_make_and_nothing_else() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    commands = [line for line in script.splitlines() if line and not line.startswith("#")]
    wanted = "if .venv/bin/python -m tests.gate.shards tests/frameworks integrations; then"
    frameworks = [wanted, "    make test-frameworks", "fi"]
    site = ["if .venv/bin/python -m tests.gate.shards docs docs; then", "    make site", "fi"]
    begin = ["set -eu", 'cd "$(dirname "$0")/.."']
    assert commands == [*begin, "make check", "make test", *frameworks, *site]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


LOOK = """
import json, os, sys, threading
before = dict(os.environ)
import torch, warnings, logging
threads, state = torch.get_num_threads(), torch.get_rng_state()
filters, handlers = list(warnings.filters), list(logging.getLogger().handlers)
running = threading.active_count()
import mend
public = [getattr(mend, name) for name in mend.__all__]
print(json.dumps({
    "modules": sorted({name.split(".")[0] for name in sys.modules}),
    "rooms": sorted(name for name in sys.modules if name.startswith("mend.")),
    "threads": threading.active_count() - running,
    "torch_threads": torch.get_num_threads() == threads,
    "rng": torch.equal(torch.get_rng_state(), state),
    "environment": dict(os.environ) == before,
    "filters": warnings.filters == filters,
    "handlers": logging.getLogger().handlers == handlers,
}))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a fresh interpreter finds behind `import mend` and all of its names; even a wrong MEND_*
    is not looked at."""
    folder = tmp_path_factory.mktemp("empty")
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MEND_NONSENSE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOOK], cwd=folder, env=environ, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert list(folder.iterdir()) == []
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_training_script_does_not_load_what_only_the_commands_need(seen: dict[str, Any]) -> None:
    assert "mend" in seen["modules"]
    assert not {"rich", "typer", "click", "numba", "prometheus_client"} & set(seen["modules"])
    assert "mend_lab" not in seen["modules"]
    assert not [name for name in seen["rooms"] if name.startswith("mend.tools")]


def test_the_command_and_the_witness_need_no_torch() -> None:
    """`mend --help` answers at once, and a witness fits on the smallest machine."""
    modules = ["mend.tools", "mend.tools.coordinate", "mend.tools.launch", "mend.engine.witness"]
    code = f"import sys, {', '.join(modules)}; print({{'torch', 'numpy'}} & set(sys.modules))"
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_mend_itself_imports_no_subprocess() -> None:
    """torch does, so a fresh interpreter cannot tell; the sources can."""
    assert OWNERS["subprocess"] == {"tools"}


def test_importing_changes_nothing(seen: dict[str, Any]) -> None:
    """No thread, no file, no setting read, no global of torch, logging or warnings moved."""
    assert seen["threads"] == 0
    for name in ("torch_threads", "rng", "environment", "filters", "handlers"):
        assert seen[name], f"import mend changed {name}"


def test_public_names_exist() -> None:
    for name in mend.__all__:
        assert getattr(mend, name) is not None
