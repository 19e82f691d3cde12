"""What the makers promise of their GPUs: one row each, with the public document that the row is from.

Peaks are dense: data sheets of NVIDIA print the number with 2:4 sparsity in large type, twice what a dense product can reach, and every
row here has half of it. Bandwidth is that of device memory. `smem_per_block` is what one program may ask for, 1 KB less than an SM has,
because the system keeps that; registers are those of one SM (a compute unit on AMD, whose local data share is the shared memory).

Surprising fact: a peak is a product of the boost clock, which no GPU holds in a long matrix product at its power limit, so that the best
measured matmul is 70 to 85 % of it. That is why `measure` times a matmul and a copy beside what it is asked about.
"""

import difflib
import re
from dataclasses import dataclass

KB, MB, GB, TB, TFLOPS = 1024, 1024**2, 10**9, 10**12, 10**12  # caches are counted in powers of two, memory and speeds in powers of ten


@dataclass(frozen=True)
class GPU:
    """What the maker says of a GPU, by its `name`.

    peaks: {dtype: FLOP/s of dense matrix products, fp32 accumulation}; "tf32" is float32 rounded to 10 bits of mantissa, "float32" runs
    on the ordinary cores. memory and bandwidth: bytes and bytes/s of device memory. sms: how many SMs, or compute units. smem_per_sm and
    smem_per_block: bytes of shared memory that an SM has and that one program may ask for. registers_per_sm, l2: bytes. marks: what
    torch's name of the device has in it, all of them. source: the document; no document has the L2 of an H200 nor the SMs and the L2 of
    Blackwell, which are what the driver says. capability: of NVIDIA GPUs, else None.
    """

    name: str
    peaks: dict[str, float]
    memory: float
    bandwidth: float
    sms: int
    smem_per_sm: int
    smem_per_block: int
    registers_per_sm: int
    l2: int
    marks: tuple[str, ...]
    source: str
    capability: tuple[int, int] | None = None

    def peak(self, dtype: str) -> float:
        """FLOP/s of products in `dtype`; ValueError, naming those there are, where the maker gives none."""
        if dtype not in self.peaks:
            raise ValueError(f"dtype={dtype!r}: the {self.name} has peaks for {', '.join(self.peaks)}")
        return self.peaks[dtype]


def _peaks(half: float, fp8: float | None, tf32: float, fp32: float) -> dict[str, float]:
    found = {"bfloat16": half, "float16": half, "float8": fp8, "tf32": tf32, "float32": fp32}
    return {dtype: tflops * TFLOPS for dtype, tflops in found.items() if tflops is not None}


def _row(name, peaks, memory, bandwidth, sms, smem, registers, l2, marks, source, capability) -> GPU:
    block = (smem - 1) * KB if capability else smem * KB
    return GPU(name, _peaks(*peaks), memory * GB, bandwidth * GB, sms, smem * KB, block, registers * KB, l2 * MB, marks, source, capability)


A100_SHEET = "NVIDIA A100 Tensor Core GPU data sheet (nvidia.com/en-us/data-center/a100); GA100 white paper, table 4"
H100_SHEET = "NVIDIA H100 Tensor Core GPU data sheet (nvidia.com/en-us/data-center/h100); GH100 white paper, tables 1 and 3"
H200_SHEET = "NVIDIA H200 Tensor Core GPU data sheet (nvidia.com/en-us/data-center/h200)"
B200_SHEET = "NVIDIA Blackwell architecture technical brief, system specifications; HGX B200 data sheet (nvidia.com/en-us/data-center/hgx)"
L40S_SHEET = "NVIDIA L40S data sheet (nvidia.com/en-us/data-center/l40s); AD102 white paper"
ADA_PAPER = "NVIDIA Ada GPU architecture white paper, appendix A (fp32 accumulation)"
AMD_SHEET = "AMD Instinct MI300X data sheet; CDNA 3 white paper (amd.com/en/products/accelerators/instinct/mi300/mi300x.html)"

# Shared memory and registers: CUDA C++ programming guide, table of technical specifications by compute capability.
# Of a row: name; fp16 and bf16, fp8, tf32, fp32 TFLOP/s; memory GB, bandwidth GB/s; SMs; KB of shared memory and of registers of an SM;
# MB of L2; marks, source, capability.
GPUS = tuple(
    _row(*row)
    for row in (
        ("A100 40GB", (312, None, 156, 19.5), 40, 1555, 108, 164, 256, 40, ("A100", "40GB"), A100_SHEET, (8, 0)),
        ("A100 80GB PCIe", (312, None, 156, 19.5), 80, 1935, 108, 164, 256, 40, ("A100", "PCIe"), A100_SHEET, (8, 0)),
        ("A100 80GB", (312, None, 156, 19.5), 80, 2039, 108, 164, 256, 40, ("A100",), A100_SHEET, (8, 0)),
        ("H100 PCIe", (756, 1513, 378, 51), 80, 2000, 114, 228, 256, 50, ("H100", "PCIe"), H100_SHEET, (9, 0)),
        ("H100 NVL", (835, 1671, 417, 60), 94, 3900, 132, 228, 256, 50, ("H100", "NVL"), H100_SHEET, (9, 0)),
        ("H100 SXM", (989, 1979, 494, 67), 80, 3350, 132, 228, 256, 50, ("H100",), H100_SHEET, (9, 0)),
        ("H200 NVL", (835, 1671, 417, 60), 141, 4800, 132, 228, 256, 60, ("H200", "NVL"), H200_SHEET, (9, 0)),
        ("H200", (989, 1979, 494, 67), 141, 4800, 132, 228, 256, 60, ("H200",), H200_SHEET, (9, 0)),
        ("GB200", (2500, 5000, 1250, 80), 186, 8000, 152, 228, 256, 126, ("GB200",), B200_SHEET, (10, 0)),
        ("B200", (2250, 4500, 1100, 75), 180, 8000, 148, 228, 256, 126, ("B200",), B200_SHEET, (10, 0)),
        ("L40S", (362, 733, 183, 91.6), 48, 864, 142, 100, 256, 96, ("L40S",), L40S_SHEET, (8, 9)),
        ("RTX 4090", (165.2, 330.3, 82.6, 82.6), 24, 1008, 128, 100, 256, 72, ("RTX 4090",), ADA_PAPER, (8, 9)),
        ("MI300X", (1307.4, 2614.9, 653.7, 163.4), 192, 5300, 304, 64, 512, 32, ("MI300X",), AMD_SHEET, None),
    )
)
UNLIKE = {"laptop", "d", "mig", "grid"}  # words of a device's name that make it another, smaller GPU
SLICE = re.compile(r" \d+[abcq] ")  # so does a profile of a virtual GPU: "NVIDIA A100-10C"
SIZE = re.compile(r" (\d+) ?gb? ")  # memory that a device's name tells: "A100-SXM-64GB" is no A100 80GB
DEFAULT = "H100 SXM"  # that tables are printed for where no GPU was named and none is there


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def find(name: str) -> GPU:
    """The GPU called `name`: by its name here ("H100 SXM", however spelled: "h100-sxm"), or by what torch calls the device ("NVIDIA H200").

    "H100" and "A100" alone are the SXM and the 80 GB ones. ValueError with the closest names when it is none of them.
    """
    if not isinstance(name, str):
        raise TypeError(f"name is {type(name).__name__}: expected the name of a GPU, as {DEFAULT!r}")
    by_name = {_plain(gpu.name): gpu for gpu in GPUS}
    if _plain(name) in by_name:
        return by_name[_plain(name)]
    if found := detect(name):
        return found
    close = difflib.get_close_matches(_plain(name), by_name, n=3, cutoff=0.3) or list(by_name)
    names = ", ".join(by_name[key].name for key in close)
    raise ValueError(f"no GPU {name!r} in the table; closest: {names}; or give its peak and bandwidth by hand (--peak, --bandwidth)")


def detect(device_name: str) -> GPU | None:
    """The first row whose marks are all in device_name, torch's name of a device; None for one that isn't in the table, or a part of one
    (MIG, a virtual GPU), or one whose name tells another size of memory."""
    plain = SIZE.sub(r" \1gb ", f" {' '.join(re.split(r'[-_ ]+', device_name.strip()))} ".lower())
    if UNLIKE & set(plain.split()) or SLICE.search(plain):
        return None
    size = SIZE.search(plain)
    fitting = (gpu for gpu in GPUS if size is None or float(size[1]) * GB == gpu.memory)
    return next((gpu for gpu in fitting if all(f" {mark.lower()} " in plain for mark in gpu.marks)), None)


def by_hand(peak: float, bandwidth: float, like: GPU, name: str = "given by hand") -> GPU:
    """A GPU called `name` of `peak` FLOP/s in every dtype and `bandwidth` bytes/s; what else there is to know is taken from `like`.

    ValueError unless both are positive.
    """
    for what, value in (("peak", peak), ("bandwidth", bandwidth)):
        if not (isinstance(value, int | float) and 0 < value < float("inf")):
            raise ValueError(f"{what}={value!r}: expected a positive number, in {'FLOP/s' if what == 'peak' else 'bytes/s'}")
    rest = {field: getattr(like, field) for field in ("memory", "sms", "smem_per_sm", "smem_per_block", "registers_per_sm", "l2")}
    peaks = dict.fromkeys(("bfloat16", "float16", "float8", "tf32", "float32"), float(peak))
    return GPU(name, peaks, bandwidth=float(bandwidth), marks=(), source="given by hand", capability=like.capability, **rest)
