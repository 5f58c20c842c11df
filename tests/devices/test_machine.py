"""Facts about the machine."""
import os

import pytest

from libml.devices.machine import usable_memory


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("memory.max", "1000000\n", 10 ** 6), ("memory/memory.limit_in_bytes", "1000000\n", 10 ** 6),
    ("memory.max", "max\n", None), ("other", "", None)])
def test_memory_is_that_of_the_container(tmp_path, name, text, expected):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert usable_memory(tmp_path) == (expected or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
