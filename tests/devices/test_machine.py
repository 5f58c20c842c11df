"""Facts about the machine."""
import os

import pytest
import tensorflow as tf

from cssl import CSSL, RunConfig
from libml import experiment
from libml.config import ScaleOptions
from libml.devices import distribute, machine
from libml.devices.machine import usable_memory


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("memory.max", "1000000\n", 10 ** 6), ("memory/memory.limit_in_bytes", "1000000\n", 10 ** 6),
    ("memory.max", "max\n", None), ("other", "", None)])
def test_memory_is_that_of_the_container(tmp_path, name, text, expected):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert usable_memory(tmp_path) == (expected or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


@pytest.mark.parametrize(("flags", "fast"), [
    ("fpu avx512f avx512_bf16 amx_bf16 amx_tile", True), ("fpu avx512f avx512_bf16", False), ("", False)])
def test_half_precision_is_taken_where_it_is_fast(flags, fast, monkeypatch):
    monkeypatch.setattr(machine, "cpu_facts", lambda: ("a CPU", flags))
    chosen = {asked: distribute.policy(ScaleOptions(mixed_precision=asked)) for asked in ("off", "bfloat16", "auto")}
    assert chosen == {"off": "float32", "bfloat16": "mixed_bfloat16", "auto": "mixed_bfloat16" if fast else "float32"}
    notes = {asked: experiment._precision(RunConfig.of(CSSL, dataset="digits.1@40-1", mixed_precision=asked))
             for asked in ("off", "float16", "bfloat16", "auto")}
    assert ("--mixed_precision=bfloat16" in notes["off"]) == fast and notes["bfloat16"] == ""
    assert "CPUs have no fast kernels for float16" in notes["float16"] and chosen["auto"] in notes["auto"]


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "float32"), ((8, 0), "mixed_bfloat16")])
def test_half_precision_of_gpus(capability, expected, monkeypatch):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["a GPU"])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: {"compute_capability": capability})
    assert distribute.policy(ScaleOptions(mixed_precision="auto")) == expected


def test_a_system_without_linux_s_files_and_calls_is_described(monkeypatch):
    def missing(path, *arguments, **named):
        raise FileNotFoundError(path)

    monkeypatch.setattr(machine.Path, "read_text", missing)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    name, features = machine.cpu_facts()
    assert name and features == "" and not machine.fast_at_bfloat16()
    assert machine.usable_cores() == os.cpu_count()
