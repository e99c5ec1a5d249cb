"""Nothing outside `xkernels.device` branches on a vendor, and no device is named by a literal in library code."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.xkernels.vendor_rules import RULES, Finding, findings

ROOT = Path(__file__).parents[3]
FOLDERS = ("kernels/xkernels", "tuner", "serving")


@dataclass(frozen=True)
class Exempt:
    """A place that may name vendors: a file, and a function, class or name at its top (None: all of it)."""

    file: str
    scope: str | None
    reason: str


_DETAILS = "kernels/xkernels/ops/_details"
EXEMPT = (
    Exempt(f"{_DETAILS}/activation.py", None, "the kernel asks Triton for its target; configs carry this file's hash: "
           "mended at the next tuning"),
    Exempt(f"{_DETAILS}/pdl.py", None, "two instructions that Triton has in a module of that name; launchers ask for "
           "them by the feature `pdl`"),
    Exempt("tuner/compile/targets.py", None, "the table of what can be compiled for without a device"),
    Exempt("tuner/child/facts.py", "_LAST_STAGES", "where Triton's own backends put a compile's last stage"),
    Exempt("tuner/engines/foreign.py", "capability", "answers what another engine's kernel asks of its vendor, for the "
           "target that is compiled for: there may be no device"),
    Exempt("tuner/pipeline.py", "_accelerator", "whether a host has any, asked where no torch is imported"),
    Exempt("tuner/pipeline.py", "_Setting", "tiles of our own were measured on that vendor's hardware alone"),
    Exempt("tuner/ray/masks.py", None, "the table of the variables with which Ray hands a device to a process"),
    Exempt("tuner/ray/lease.py", "_is_intel", "what a node is, in Ray's worker, before a device is leased"),
    Exempt("serving/engines/foreign.py", "_PROBE", "runs in another engine's process, which has no device module of "
           "ours"),
)  # fmt: skip


def sources() -> list[Path]:
    found = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))]
    return [p for p in found if p.parent != ROOT / "kernels/xkernels/device"]


def found_in(path: Path) -> list[Finding]:
    return list(findings(ast.parse(path.read_text(encoding="utf-8"))))


def test_there_is_something_to_look_at() -> None:
    assert len(sources()) > 20
    assert found_in(ROOT / "kernels/xkernels/device/cuda.py")


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_vendor_outside_the_device_module(path: Path) -> None:
    scopes = {exempt.scope for exempt in EXEMPT if ROOT / exempt.file == path}
    left = [finding for finding in found_in(path) if not scopes & {None, finding.scope}]
    assert not left, f"{path}: ask xkernels.device instead: {left}"


@pytest.mark.parametrize("exempt", EXEMPT, ids=lambda e: f"{e.file}:{e.scope}")
def test_what_is_exempt_needs_it(exempt: Exempt) -> None:
    assert [finding for finding in found_in(ROOT / exempt.file) if exempt.scope in (None, finding.scope)]


FORBIDDEN = """
import torch as t; t.cuda.synchronize()
from torch import cuda
import torch.cuda
from torch.cuda import is_available
getattr(torch, 'cuda').synchronize()
torch.get_device_module('cuda')
torch.empty(1, device=f'cuda:{i}')
D = 'cuda'
x.cuda()
x.xpu()
torch.accelerator.current_accelerator()
torch.Generator('cuda')
torch.load(f, map_location='cuda')
torch.set_default_device('cuda')
with torch.autocast('cuda'): pass
if live().kind == 'cuda': pass
if device.kind != 'rocm': pass
if dev.platform().startswith('cuda'): pass
if 'gfx' in device.arch(): pass
if kind in ('cuda', 'rocm'): pass
match x.device.type:\\n  case 'cuda': pass
match x.device.type:\\n  case 'cpu' | 'xpu': pass
t = x.device.type\\nif t == 'cuda': pass
if isinstance(d, CudaDevice): pass
from xkernels.device.cuda import CudaDevice
from xkernels.device import XpuDevice
from triton.language.target_info import is_cuda
if is_cuda(): pass
if current_platform.is_cuda_alike(): pass
if torch.version.__dict__['hip']: pass
if torch.version.hip: pass
if torch.cuda.is_available(): pass
if x.is_cuda: pass
torch.mtia.x
torch.musa.synchronize()
torch.hpu.x()
x.to(device='npu')
x.to('xpu:0')
torch.device('cuda', 0)
torch.device(type='cuda')
torch.tensor(1, device=('cuda'))
torch.zeros(1, device='cuda' if ok else 'cpu')
import intel_extension_for_pytorch
torch.backends.cuda.matmul
if torch.backends.mps.is_available(): pass
if platform == 'xpu-bmg': pass
if arch in {'sm_90', 'sm_100'}: pass
subprocess.run(['nvidia-smi'])
os.environ['CUDA_VISIBLE_DEVICES']
if vendor == 'nvidia': pass
if name.startswith('Intel(R)'): pass
P = 'import torch\\\\nprint(torch.cuda.device_count())'
def f():\\n  \"\"\"A docstring.\"\"\"\\n  return 'cuda'
""".strip().splitlines()

HARMLESS = """
if live().kind == 'cpu': pass
x = torch.empty(1, device=live().torch_device())
x.to(device)
torch.device('cpu')
torch.empty(1, device='meta')
from xkernels.device import Device, live
def f():\\n  \"\"\"On cuda and xpu: see torch.cuda.\"\"\"
"cuda"
raise ValueError('a cuda device is needed, or an xpu')
print(f'{name} is no cuda device')
STAGES = {'nvidia': 3, 'amd': 2, 'intel': 2}
if 'wgmma' in device.features(): pass
if scheme.kind == 'none': pass
names = ['hipster', 'accelerate', 'cudagraph', 'small', 'smooth_quant']
os.environ['SGLANG_KERNEL']
is_cudagraph = False
cuda_ish = 1
match word:\\n  case 'up': pass
x.shape, x.is_contiguous(), x.device.type
""".strip().splitlines()


def of(code: str) -> list[Finding]:
    return list(findings(ast.parse(code.encode().decode("unicode_escape"))))


@pytest.mark.parametrize("code", FORBIDDEN)
def test_the_rules_find_what_they_forbid(code: str) -> None:
    assert of(code)


@pytest.mark.parametrize("code", HARMLESS)
def test_the_rules_leave_alone_what_is_harmless(code: str) -> None:
    assert not of(code)


def test_every_rule_finds_something_that_no_other_one_does() -> None:
    alone = defaultdict(list)
    for code in FORBIDDEN:
        rules = {finding.rule for finding in of(code)}
        if len(rules) == 1:
            alone[rules.pop()].append(code)
    assert set(alone) == {rule.name for rule in RULES}
