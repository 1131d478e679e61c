"""What NCCL writes, shortened: the elements, attributes and their order are those of real dumps."""

from __future__ import annotations

NVSWITCH = (
    '<nvlink target="0000:f5:00.0" count="9" tclass="0x068000"/>'
    '<nvlink target="0000:f4:00.0" count="9" tclass="0x068000"/>'
)
GPU_PCI = 'class="0x030200" vendor="0x10de" device="0x2330" link_speed="32.0 GT/s PCIe"'
NIC_PCI = 'class="0x020000" vendor="0x15b3" device="0x1021" link_speed="32.0 GT/s PCIe"'
BRIDGE = 'class="0x060400" vendor="0x1000" device="0xc030" link_speed="32.0 GT/s PCIe"'

GPUS = ("18", "2a", "3a", "5d", "9a", "ab", "ba", "db")
"""Buses of the eight GPUs of `dgx`; one bridge with one network card each."""


def _branch(dev: int) -> str:
    bus = int(GPUS[dev], 16)
    return f"""
    <pci busid="0000:{bus - 2:02x}:00.0" {BRIDGE} link_width="16">
      <pci busid="0000:{bus:02x}:00.0" {GPU_PCI} link_width="16">
        <gpu dev="{dev}" sm="90" rank="{dev}" gdr="1">{NVSWITCH}</gpu>
      </pci>
      <pci busid="0000:{bus + 1:02x}:00.0" {NIC_PCI} link_width="16">
        <nic>
          <net name="mlx5_{dev}" dev="{dev}" speed="400000" port="1" latency="0.000000"
               guid="0xa87cb10003e1a25{dev}" maxconn="131072" gdr="1"/>
        </nic>
      </pci>
    </pci>"""


def _cpu(numa: int, affinity: str, inside: str, host: str = "0x16fe256e956b115c") -> str:
    return f"""
  <cpu host_hash="{host}" numaid="{numa}" affinity="{affinity}" arch="x86_64"
       vendor="GenuineIntel" familyid="6" modelid="143">{inside}
  </cpu>"""


def dgx() -> str:
    """Eight GPUs behind NVSwitches, four on each of two processors of 48 cores, 2 threads each."""
    low, high = _mask(range(48), range(96, 144)), _mask(range(48, 96), range(144, 192))
    first, second = (_cpu(n, mask, "".join(map(_branch, devs))) for n, mask, devs in (
        (0, low, range(4)), (1, high, range(4, 8)),
    ))  # fmt: skip
    return f'<system version="1">{first}{second}\n</system>\n'


def _mask(*runs: range) -> str:
    """As /sys/devices/system/node/node0/cpumap."""
    bits = sum(1 << core for run in runs for core in run)
    words = [f"{bits >> 32 * word & 0xFFFFFFFF:08x}" for word in reversed(range(6))]
    return ",".join(words)


CLOUD = f"""<system version="1">
  <cpu host_hash="0x51a8d39608097de4" numaid="-1" arch="x86_64" vendor="GenuineIntel" familyid="6">
    <pci busid="0000:05:00.0" {GPU_PCI} link_width="16">
      <gpu dev="0" sm="90" rank="0" gdr="1"/>
    </pci>
    <pci busid="0000:06:00.0" {GPU_PCI} link_width="16">
      <gpu dev="1" sm="90" rank="1" gdr="1"/>
    </pci>
    <pci busid="0000:0d:00.0" {NIC_PCI} link_width="16">
      <nic>
        <net name="mlx5_0" dev="0" speed="400000" port="1" guid="0xa87c" gdr="1"/>
      </nic>
    </pci>
  </cpu>
</system>
"""
"""Two GPUs of a virtual machine that shows neither bridges nor NUMA nodes."""


def sockets() -> str:
    """One GPU on each of two processors, no NVLink between them; a network card on the first."""
    gpu = '<pci busid="0000:{}:00.0" class="0x030200"><gpu dev="{}" sm="80" rank="{}"/></pci>'
    card = '<pci busid="0000:20:00.0" class="0x020000"><nic><net name="eth0" dev="0"/></nic></pci>'
    first, second = gpu.format("17", 0, 0), gpu.format("b1", 1, 1)
    return (
        f'<system version="1">{_cpu(0, "0000ffff", first + card)}{_cpu(1, "ffff0000", second)}'
        "</system>"
    )
