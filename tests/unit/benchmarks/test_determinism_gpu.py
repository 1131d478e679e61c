"""The benchmarks of the levels on a GPU, as far as a machine without one can run them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import aot_module_simplified, make_boxed_func  # type: ignore[attr-defined]
from torch import Tensor, nn

from benchmarks import determinism_digests as digests
from benchmarks import determinism_gpu as bench
from benchmarks._determinism_models import Gpt, Llama, loss_of
from mend.determinism.enabling import enabled


def tiny() -> nn.Module:
    return Gpt(32, 16, 1, 2, tokens=8)


def times(ms: float) -> dict[str, Any]:
    return {"ms": ms, "ms_quartiles": [ms, ms], "of_plain": ms / 10, "of_compiled": ms / 8}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (
            ["8 x 1024"],
            ["GPT-2 124M, 8 x 1024", "Llama 1.1B, 8 x 1024, 8 leaves", bench.EVERYWHERE],
        ),
        (["GPT-2 124M, 8 x 1024"], ["GPT-2 124M, 8 x 1024"]),
        ([], [*bench.SHAPES, bench.EVERYWHERE]),
    ],
)
def test_rows_are_chosen_by_a_part_of_the_name_or_by_all_of_it(
    wanted: list[str], found: list[str]
) -> None:
    assert bench.chosen_rows(wanted) == found


def test_part_that_is_in_no_name_is_refused_with_the_names() -> None:
    with pytest.raises(SystemExit, match=r"GPT-3.*the rows are GPT-2 124M, 8 x 1024;"):
        bench.chosen_rows(["GPT-3"])


def test_rows_have_the_tokens_and_leaves_of_their_names() -> None:
    for name, shape in bench.SHAPES.items():
        assert f"{shape.rows} x {shape.tokens}" in name
        assert shape.rows * shape.tokens in (8192, 16384)
        assert shape.rows % shape.leaf_rows == 0
        assert shape.leaves == (8 if "GPT" in name or "8 leaves" in name else 2)


def test_every_row_is_written_and_printed_as_soon_as_it_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, seen = tmp_path / "out.json", list[set[str]]()

    def measure(name: str) -> dict[str, Any]:
        seen.append(set(json.loads(out.read_text())) if out.exists() else set())
        if name == "full":
            raise torch.OutOfMemoryError("no memory\nmore")
        return {"leaves": 8, "eager": {"plain": times(10)}}

    assert not bench.measure_all(["one", "full", "last"], measure, {"gpu": "x"}, out)
    assert seen == [set(), {"gpu", "one"}, {"gpu", "one", "full"}]
    assert json.loads(out.read_text())["full"] == {"failed": "no memory"}
    said = capsys.readouterr().out
    assert "| eager: plain | 10 | 10, 10 | 1.0 | 1.25 |  |" in said
    assert "failed: no memory" in said


def test_table_judges_the_figures_that_have_a_goal() -> None:
    row = {
        "leaves": 8,
        "device": {"compiled": times(8), "shape": times(8.7)},
        "device, run": {"run": times(10.6)},
        "device, run compiled": {"run compiled": times(8)},
        "run compiled: failed": "of the test",
        "trainer": {"shape": times(9), "peak_gib": 3.0},
    }
    lines = bench.table("GPT-2 124M, 8 x 1024", row).splitlines()
    ends = {line.split(" | ")[0]: line.split(" | ")[-1] for line in lines if " | " in line}
    assert ends["| device: shape"] == "<= 1.10 of compiled: met |"
    assert ends["| device, run: run"] == "<= 1.05 of plain: missed |"
    assert ends["| device, run compiled: run compiled"] == "<= 1.05 of compiled: met |"
    assert ends["| trainer: shape"] == " |"
    assert lines[-1] == "run compiled: failed: of the test"


def test_steps_of_level_run_are_measured_under_it_alone() -> None:
    levels: dict[str, list[str | None]] = {"plain": [], "run": [], "run compiled": []}

    def timed(step: bench.Step, count: int) -> float:
        active = enabled()
        levels[step()].append(active.level if active else None)
        return float(count)

    steps = {name: (lambda name=name: name) for name in levels}
    found = bench.measured(steps, 2, 3, timed)
    assert levels == {"plain": [None] * 2, "run": ["run"] * 2, "run compiled": ["run"] * 2}
    assert found == {name: [3.0, 3.0] for name in levels}


def test_failure_of_level_run_is_noted_and_of_others_raised() -> None:
    def fail() -> None:
        raise RuntimeError("captured\nmore")

    assert bench.obstacle("run compiled", fail) == "captured"
    with pytest.raises(RuntimeError, match="captured"):
        bench.obstacle("compiled", fail)


@pytest.mark.parametrize("make", [tiny, lambda: Llama(32, 16, 1, 2, 1, 32)])
def test_variants_train_one_set_of_weights(make: Any) -> None:
    model = make()
    other = bench.outside_compile(bench.sharing(model, make))
    mine, theirs = (dict(each.named_parameters(remove_duplicate=False)) for each in (model, other))
    assert mine.keys() == theirs.keys()
    assert all(each is theirs[name] for name, each in mine.items())
    words_BT = torch.randint(0, 32, (2, 9))
    assert torch.equal(loss_of(model, words_BT), loss_of(other, words_BT))
    before = next(iter(model.parameters())).clone()
    bench.step_of(other, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), words_BT)()
    assert not torch.equal(before, next(iter(model.parameters())))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it
def test_gradient_of_an_embedding_is_left_out_of_compiled_code() -> None:
    """Its index_put_ waits for the GPU under deterministic algorithms: no graph can hold it."""

    def operators(model: nn.Module) -> set[str]:
        found = set[str]()

        def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            found.update(str(node.target) for node in graph.graph.nodes)
            return make_boxed_func(graph)

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            return aot_module_simplified(graph, inputs, fw_compiler=note, bw_compiler=note)

        torch.compiler.reset()
        words_BT: Tensor = torch.randint(0, 32, (2, 9))
        loss = loss_of(torch.compile(model, backend=backend, dynamic=False), words_BT)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.compiler.reset()
        return found

    gradient = "aten.embedding_dense_backward.default"
    assert gradient in operators(tiny())
    left = operators(bench.outside_compile(tiny()))
    assert gradient not in left
    assert "aten.addmm.default" in left, "the layers are compiled"


def test_digest_is_equal_in_both_cuts_and_another_for_other_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make = digests.partial(Gpt, width=16, layers=1, heads=2, tokens=8)
    trainings = {f"of {words}": digests.Training(make, words, 4, 8) for words in (32, 33)}
    found, agree = digests.digests([*trainings], "cpu", trainings)
    assert agree
    assert len(set(found.values())) == 2
    assert capsys.readouterr().out.startswith(f"{found['of 32'][:24]}  of 32\n")


def test_digests_that_differ_are_named() -> None:
    one = {"digests": {"a": "1", "b": "2", "c": "3"}}
    other = {"digests": {"a": "1", "b": "9"}}
    assert digests.differences(one, other) == ["b"]
