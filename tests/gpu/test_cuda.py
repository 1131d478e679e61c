"""On a GPU: the bits of the CPU, nothing on the training stream but events, memory as counted."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mend
from mend.codec.on_device import ON_DEVICE
from mend.engine.features.micro_benchmark import GEMM_NS_MAX, LiveBenchmark
from mend.errors import ConfigError
from mend.fragment import FragmentView, build_plan, exchanged_parameters, realign
from mend.fragment.device import Move, Side
from mend.fragment.shards import replicated
from mend.kernels import ROW_NUMEL
from mend.tools.ports import free_ports

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
CUDA = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
STEPS = 26
WORKSPACE_BYTES = 32 << 20
"""Of a handle of cuBLAS on Hopper."""
SLEEP_CYCLES = 4 * 10**9
"""Two seconds of a GPU's clock: more than the training thread waits for the launches."""
CODECS = ("bf16", "int8", "int4", "e3m0", "topk", "powersgd", "sparse")


def alone(**more: Any) -> mend.MendConfig:
    """A job of one rack: every round merges its own offer, by the whole real path."""
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    own: dict[str, Any] = {
        "rack": 0, "racks": 1, "sideband_addr": address, "sideband_peers": (address,),
        "fragments": 3, "sync_period_steps": 8, "overlap_steps": 2, "lockstep": True,
        "wait_timeout_s": 60,
    }  # fmt: skip
    return mend.MendConfig(**{**own, **more})


def model(dtype: torch.dtype, width: int = 700) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(width, width), nn.Linear(width, 31), nn.Conv2d(3, 5, 3)]
    layers[2].to(memory_format=torch.channels_last)
    return nn.ModuleList(layers).to(dtype)


class Lion(torch.optim.Optimizer):
    """The same updates on every device: what the exchange does is all that can differ. Keeps a
    moment that mend knows by the optimizer's name."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"betas": (0.9, 0.99)})
        self.chance = torch.Generator().manual_seed(5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                change = torch.randn(parameter.shape, generator=self.chance) * 0.01
                parameter.copy_((parameter.cpu().float() + change).to(parameter.dtype))
                state = self.state[parameter]
                before = state.setdefault("exp_avg", torch.zeros_like(parameter))
                before.copy_((before.cpu().float() * 0.99 + change).to(before.dtype))


def trained(device: torch.device, dtype: torch.dtype, **more: Any) -> tuple[list[Tensor], Any]:
    """Parameters, then moments; what the runtime tells."""
    made = model(dtype).to(device)
    optimizer = Lion(made.parameters())
    with mend.session(made, alone(**more), optimizer) as runtime:
        for _ in range(STEPS):
            optimizer.step()
    moments = [optimizer.state[parameter]["exp_avg"] for parameter in made.parameters()]
    return [*made.parameters(), *moments], runtime.status()


def bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.int32 if flat.element_size() == 4 else torch.int16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "more",
    [{}, {"apply_mode": "blend", "outer_lr": 0.7}, {"apply_mode": "overwrite"},
     {"concurrent_outer_step": False}, {"codec": "bfloat16"},
     {"momentum_sync_period_steps": 4},
     *({"codec": each} for each in CODECS)],
    ids=str,
)  # fmt: skip
def test_a_model_on_a_gpu_comes_to_the_bits_of_one_on_the_cpu(
    dtype: torch.dtype, more: dict[str, Any]
) -> None:
    host, told = trained(torch.device("cpu"), dtype, **more)
    device, seen = trained(CUDA, dtype, **more)
    assert told.anchor_digest == seen.anchor_digest
    assert told.versions == seen.versions
    for number, (one, other) in enumerate(zip(host, device, strict=True)):
        assert torch.equal(bits(one), bits(other)), number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("apply_mode", ["carry", "overwrite", "blend"])
@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "e3m0", "topk"])
def test_a_gpu_that_encodes_comes_to_the_bits_of_a_model_on_the_cpu(
    dtype: torch.dtype, apply_mode: str, codec: str
) -> None:
    more = {"apply_mode": apply_mode, "codec": codec}
    host, told = trained(torch.device("cpu"), dtype, **more)
    device, seen = trained(CUDA, dtype, encode_on="device", **more)
    assert told.anchor_digest == seen.anchor_digest
    assert told.payload_bytes == seen.payload_bytes > 0
    assert told.residual_share == pytest.approx(seen.residual_share, rel=1e-4)
    for number, (one, other) in enumerate(zip(host, device, strict=True)):
        assert torch.equal(bits(one), bits(other)), number


def test_a_gpu_that_encodes_is_refused_where_it_cannot() -> None:
    config = alone(codec="int4", encode_on="device")
    with pytest.raises(ConfigError, match="needs a model on one GPU; this one is on the CPU"):
        mend.mend_init(model(torch.float32), config=config)


def test_the_benchmark_of_encoding_says_what_a_result_needs() -> None:
    words = ["-m", "benchmarks.device_encode", "--numel", "100000", "--repeats", "2"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert set(told["captures"]) == {"host", *(f"{name} device" for name in ON_DEVICE)}
    assert told["captures"]["host"]["bus_bytes"] == 400_000


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("apply_mode", ["carry", "overwrite", "blend"])
def test_an_apply_on_the_side_stream_is_realign(named: bool, apply_mode: Any) -> None:
    made = model(torch.float32, width=2500).to(CUDA)
    (layout,) = build_plan(made, 1)
    view = FragmentView(layout, [p for _, p in exchanged_parameters(made)])
    owned = replicated(layout, 1, 0).owned
    vectors = [torch.randn(owned.numel).pin_memory() for _ in range(3)]
    anchor_N, delta_N, next_N = vectors
    before_N = torch.empty(owned.numel)
    view.read(owned, before_N)
    expected_N = before_N.clone()
    delta = delta_N if named else None
    realign(expected_N, anchor_N, delta, next_N, apply_mode, 0.3, expected_N)
    side = Side(CUDA)
    uploaded = side.upload(Move(0, 1, int(named), apply_mode), anchor_N, delta, next_N)
    side.apply(view, owned, uploaded, 0.3)
    after_N = torch.empty(owned.numel)
    view.read(owned, after_N)
    assert torch.equal(bits(after_N), bits(expected_N))
    side.close()


def test_a_snapshot_is_of_its_moment_though_training_goes_on_at_once() -> None:
    """The next step may write as soon as the copy on the device is made, not before."""
    made = nn.Linear(4096, 4096, bias=False).to(CUDA)
    (layout,) = build_plan(made, 1)
    view, owned = FragmentView(layout, [made.weight]), replicated(layout, 1, 0).owned
    side = Side(CUDA)
    busy = torch.randn(4096, 4096, device=CUDA)
    for value in range(20):
        with torch.no_grad():
            made.weight.fill_(float(value))
        for _ in range(10):
            busy = torch.tanh(busy @ busy)
        out_N = torch.empty(owned.numel).pin_memory()
        landed = side.snapshot(view, owned, out_N)
        with torch.no_grad():
            made.weight.fill_(-1.0)
        landed()
        assert bool((out_N == float(value)).all()), f"a snapshot of {value} holds {out_N.unique()}"
    side.close()


@pytest.mark.parametrize(("codec", "kept"), [("", 0), ("int8", 8), ("topk", 4)])
def test_memory_is_what_is_counted(codec: str, kept: int) -> None:
    """kept: bytes per element that stay on a GPU that encodes."""
    gc.collect()
    torch.cuda.empty_cache()
    made = model(torch.bfloat16, width=9000).to(CUDA)
    numel = sum(p.numel() for p in made.parameters())
    largest = max(layout.numel for layout in build_plan(made, 3))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-3)
    how = {"codec": codec, "encode_on": "device"} if codec else {}
    with mend.session(made, alone(**how), optimizer) as runtime:
        for _ in range(STEPS):
            for parameter in made.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        status = runtime.status()
    # docs/tuning.md, Does it fit the machine: the host keeps what int8, the default, leaves out.
    residuals = 0 if codec else 1
    in_flight = 4 * numel * (status.racks_configured + 3 + residuals)
    most = 16 * numel + 4 * numel * residuals + in_flight
    assert 0 < status.host_bytes <= most, "with outer momentum, as by default"
    stays = kept * numel + 4 * largest if codec else 0
    assert stays < status.device_bytes_peak <= stays + 3 * 4 * largest
    gradients = sum(2 * p.numel() for p in made.parameters())
    # torch's allocator leaves up to 1 MiB at the end of a block with its vector: an anchor and a
    # residual per fragment where the device encodes, a delta and what is left out of it, and two
    # that are uploaded. What an encoder leaves out is kept in whole rows.
    vectors = 4 + (3 * kept // 4)
    scratch = (2 * 64 << 20) + vectors * ((1 << 20) + 4 * ROW_NUMEL)
    most = torch.cuda.max_memory_allocated() - before
    assert most <= gradients + status.device_bytes_peak + scratch


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores", "ignore:.*script_method.*")
def test_a_compiled_model_and_a_graph_train_unchanged() -> None:
    made = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(CUDA)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
    compiled = torch.compile(made)
    x, y = torch.randn(32, 64, device=CUDA), torch.randn(32, 8, device=CUDA)
    with mend.session(compiled, alone(), optimizer) as runtime:
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            nn.functional.mse_loss(compiled(x), y).backward()
            optimizer.step()
        assert runtime.status().rounds_committed > 0

    replayed = nn.Linear(64, 8).to(CUDA)
    capturable = torch.optim.Adam(replayed.parameters(), lr=0.01, capturable=True)

    def once() -> Tensor:
        capturable.zero_grad(set_to_none=False)
        loss = nn.functional.mse_loss(replayed(x), y)
        loss.backward()
        capturable.step()
        return loss

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            once()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = once()
    with mend.session(replayed, alone()) as runtime:
        losses = []
        for _ in range(STEPS):
            graph.replay()
            runtime.step(tokens=32)
            losses.append(float(loss.detach()))
        assert runtime.status().rounds_committed > 0
    assert losses[-1] < losses[0]


def test_a_step_that_is_captured_is_refused_with_the_remedy() -> None:
    made = nn.Linear(64, 8).to(CUDA)
    optimizer = torch.optim.Adam(made.parameters(), lr=0.01, capturable=True)
    made.weight.grad, made.bias.grad = torch.ones_like(made.weight), torch.ones_like(made.bias)
    optimizer.step()
    runtime = mend.mend_init(made, alone(), optimizer)
    try:
        graph = torch.cuda.CUDAGraph()
        refused = pytest.raises(mend.MendError, match="each replay, from the first one on")
        with refused, torch.cuda.graph(graph):
            optimizer.step()
    finally:
        runtime.abort()


def test_the_micro_benchmark_draws_no_number_sees_no_mode_and_keeps_little_memory() -> None:
    """cuBLAS has a workspace for each of its handles, and a thread that begins while another one
    ends takes a second handle; there are no more of them however many products are made."""
    benchmark = LiveBenchmark(CUDA)

    def product_ns() -> int:
        while (found_ns := benchmark.product_ns()) is None:
            torch.cuda.synchronize(CUDA)
        return found_ns

    assert 0 < product_ns() <= GEMM_NS_MAX
    torch.cuda._sleep(SLEEP_CYCLES)  # the products begin after it
    assert benchmark.product_ns() is None, "the training thread waited for the products"
    assert 0 < product_ns() <= GEMM_NS_MAX
    before, held = torch.cuda.get_rng_state(CUDA), torch.cuda.memory_allocated(CUDA)
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.inference_mode():
        times_ns = [product_ns() for _ in range(30)]
    assert all(0 < each <= GEMM_NS_MAX for each in times_ns)
    assert torch.equal(torch.cuda.get_rng_state(CUDA), before)
    assert torch.cuda.memory_allocated(CUDA) <= held + 2 * WORKSPACE_BYTES
