"""Facts about the machine that need no TensorFlow."""
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

CARDS = "name,memory.total,driver_version,compute_cap"  # what `unusable_cards` wants to know of each
INSTALL = "pip install 'cssl[gpu]' brings CUDA's libraries"
CONTAINER = "NVIDIA's container of TensorFlow (nvcr.io/nvidia/tensorflow) has newer ones"


def cpu_facts() -> tuple[str, str]:
    """Returns the CPU's name and its features, "" where only the kind is known."""
    lines: dict[str, str] = {}
    with suppress(OSError):  # only Linux has it
        lines |= re.findall(r"^([\w ]+?)\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    return (lines.get("model name") or platform.processor() or platform.machine(),
            lines.get("flags") or lines.get("Features", ""))


def fast_at_bfloat16() -> bool:
    """Whether the CPU multiplies matrices of bfloat16 in hardware of its own: Intel's since Sapphire Rapids."""
    return "amx_bf16" in cpu_facts()[1].split()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes of memory this process may use: the machine's, or what its container is given."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in (root / "memory.max", root / "memory" / "memory.limit_in_bytes"):  # of version 2 and 1 of cgroups
        with suppress(OSError, ValueError):  # another system; "max"
            sizes.append(int(limit.read_text()))
    return min(sizes)


def nvidia_smi(query: str) -> list[str]:
    """Returns a line for each GPU that the driver knows: also for those that TensorFlow cannot use."""
    if not shutil.which("nvidia-smi"):
        return []
    done = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True,
                          text=True, errors="replace", timeout=60)
    if done.returncode == 6:  # it has found none
        return []
    done.check_returncode()
    return done.stdout.strip().splitlines()


def unusable_cards(listed: Sequence[str], seen: int, built: Collection[str], hidden: str | None) -> str:
    """Returns which cards that the driver lists TensorFlow cannot use, and the cure; "" where it uses all that it may.

    Args:
        seen: the number of GPUs that TensorFlow sees.
        built: the kinds of cards for which it has kernels.
        hidden: CUDA_VISIBLE_DEVICES, which may leave some cards out.
    """
    if len(listed) > seen and (hidden is None or not seen and hidden not in ("", "-1")):
        return (f"nvidia-smi lists {'; '.join(listed)}, TensorFlow uses {seen}: {INSTALL} (unless CUDA_VISIBLE_DEVICES "
                "hides cards)")
    for card in listed if seen else []:
        own = re.search(r", (\d+)\.(\d)$", card)
        if own and not any(fits(int(own[1]), int(own[2]), kind) for kind in built):
            return f"{card}: this TensorFlow has kernels for {', '.join(built)}: {CONTAINER}"
    return ""


def fits(major: int, minor: int, kind: str) -> bool:
    """Whether a card runs kernels of a kind: sm_80 those of 8.0 to 8.9, compute_90 what is compiled when it starts."""
    built = re.search(r"_(\d+)(\d)", kind)
    return built is not None and int(built[1]) == major and int(built[2]) <= minor


def gpu_memory(names: Collection[str]) -> int | None:
    """Returns the bytes of memory of the smallest GPU of these names; None where the driver does not tell."""
    sizes = []
    with suppress(OSError, subprocess.SubprocessError):
        for line in nvidia_smi("name,memory.total"):
            name, _, size = line.rpartition(",")
            if name in names and re.fullmatch(r" *\d+ MiB", size):
                sizes.append(int(size.split()[0]) << 20)
    return min(sizes, default=None)
