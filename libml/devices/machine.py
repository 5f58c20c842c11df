"""Facts about the machine that need no TensorFlow."""
import os
import platform
import re
from contextlib import suppress
from pathlib import Path


def cpu_facts() -> tuple[str, str]:
    """Returns the CPU's name and its features, "" where only the kind is known."""
    lines: dict[str, str] = {}
    with suppress(OSError):  # only Linux has it
        lines |= re.findall(r"^([\w ]+?)\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    return (lines.get("model name") or platform.processor() or platform.machine(),
            lines.get("flags") or lines.get("Features", ""))


def usable_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes of memory this process may use: the machine's, or what its container is given."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in (root / "memory.max", root / "memory" / "memory.limit_in_bytes"):  # of version 2 and 1 of cgroups
        with suppress(OSError, ValueError):  # another system; "max"
            sizes.append(int(limit.read_text()))
    return min(sizes)
