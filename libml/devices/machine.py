"""Facts about the machine that need no TensorFlow."""
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path


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


def gpu_memory(names: Collection[str]) -> int | None:
    """Returns the bytes of memory of the smallest GPU of these names; None where the driver does not tell."""
    sizes = []
    with suppress(OSError, subprocess.SubprocessError):
        for line in nvidia_smi("name,memory.total"):
            name, _, size = line.rpartition(",")
            if name in names and re.fullmatch(r" *\d+ MiB", size):
                sizes.append(int(size.split()[0]) << 20)
    return min(sizes, default=None)
