"""What XLA compiled is kept between runs, whole or not at all, and never for another CPU."""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from libml import xla_cache
from libml.xla_cache import FLAG, XlaCache

ROOT = Path(__file__).parents[2]
NAME = "xla_compile_cache__1__2__XLA_CPU_JIT.pb"


@pytest.fixture
def without_tensorflow(monkeypatch):
    """As a process that has not imported it."""
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.setattr(xla_cache, "cpu_facts", lambda: ("some CPU", "sse avx"))
    monkeypatch.setattr(xla_cache, "_tensorflow_version", lambda: "2.21.0")


def compiled(cache, content=b"code", name=NAME):
    """As TensorFlow does it."""
    (cache.own / name).write_bytes(content)


def fetched(folder, **environment):
    """What the next process finds, by name."""
    cache = XlaCache(folder, environment)
    found = {file.name: file.read_bytes() for file in cache.own.iterdir()}
    cache.close()
    return found


def test_one_process_finds_what_another_compiled(tmp_path, without_tensorflow):
    environment = {"TF_XLA_FLAGS": "--tf_xla_auto_jit=1"}
    cache = XlaCache(tmp_path, environment)
    assert environment["TF_XLA_FLAGS"].split()[:2] == ["--tf_xla_auto_jit=1", f"{FLAG}={cache.own}"]
    compiled(cache)
    cache.keep()
    assert fetched(tmp_path) == {NAME: b"code"}  # while the first still runs
    compiled(cache, b"more", "other.pb")
    own = cache.own
    cache.close()
    assert not own.exists() and environment == {"TF_XLA_FLAGS": "--tf_xla_auto_jit=1"}
    assert fetched(tmp_path) == {NAME: b"code", "other.pb": b"more"}


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: b"", lambda content: b"x" + content])
def test_damaged_files_are_dropped(tmp_path, without_tensorflow, damage):
    cache = XlaCache(tmp_path, {})
    compiled(cache)
    compiled(cache, b"more", "other.pb")
    cache.close()
    file = next(tmp_path.rglob(f"*{NAME}"))
    file.write_bytes(damage(file.read_bytes()))
    assert fetched(tmp_path) == {"other.pb": b"more"}
    assert not file.exists()


def test_other_machines_and_versions_have_their_own(tmp_path, without_tensorflow, monkeypatch):
    cache = XlaCache(tmp_path, {})
    compiled(cache)
    cache.close()
    assert fetched(tmp_path, XLA_FLAGS="--xla_cpu_max_isa=AVX2") == {}
    monkeypatch.setattr(xla_cache, "_tensorflow_version", lambda: "2.20.0")
    assert fetched(tmp_path) == {}
    monkeypatch.setattr(xla_cache, "_tensorflow_version", lambda: "2.21.0")
    assert fetched(tmp_path) == {NAME: b"code"}
    monkeypatch.setattr(xla_cache, "cpu_facts", lambda: ("some CPU", "sse avx avx512f"))
    assert fetched(tmp_path) == {}


def test_nothing_where_something_is_in_the_way(tmp_path, without_tensorflow, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    theirs = f"{FLAG}=/theirs"
    for folder, environment in ((file / "below", {}), (tmp_path / "two words", {}), (Path("~/x"), {}),
                                (tmp_path, {"TF_XLA_FLAGS": theirs})):
        before = dict(environment)
        cache = XlaCache(folder, environment)
        cache.keep()
        cache.close()
        assert environment == before
    for name, value in (("cpu_facts", lambda: ("Apple", "")), ("_tensorflow_version", lambda: "2.22.0"),
                        ("FREE_BYTES", 1 << 60)):
        with monkeypatch.context() as patch:
            patch.setattr(xla_cache, name, value)
            environment = {}
            XlaCache(tmp_path / "new", environment).close()
            assert environment == {}
    monkeypatch.setitem(sys.modules, "tensorflow", object())
    assert XlaCache(tmp_path, {}).own is None


def test_what_is_old_goes(tmp_path, without_tensorflow, monkeypatch):
    monkeypatch.setattr(xla_cache, "MAX_BYTES", 25)
    cache = XlaCache(tmp_path, {})
    for number in range(4):
        compiled(cache, bytes([number]) * 10, f"{number}.pb")
    cache.keep()
    for age, name in enumerate(("2.pb", "0.pb", "3.pb", "1.pb")):  # newest first
        os.utime(next(cache.store.glob(f"*-{name}")), (time.time() - 60 * age,) * 2)
    os.utime(cache.own, (time.time() - xla_cache.ABANDONED_SECONDS - 1,) * 2)  # as if it had been killed
    assert fetched(tmp_path) == {"2.pb": b"\2" * 10, "0.pb": b"\0" * 10}
    assert not cache.own.exists()


@pytest.mark.slow
def test_a_second_run_compiles_nothing_nor_does_its_continuation(tmp_path):
    """The real program: TensorFlow writes a file for all that it compiles, and the later runs' are older than that."""
    flags = ["--dataset=digits.1@40-1", "--batch=4", "--uratio=1", "--filters=8", "--scales=1", "--repeat=1",
             "--train_kimg=100000", "--report_kimg=0.01", "--augment=d.d.x"]  # the quickest to compile
    new, results = [], []
    for number in (0, 1, 1):
        folder = tmp_path / str(number)
        process = subprocess.Popen([sys.executable, "cssl.py", *flags, f"--train_dir={folder}"], cwd=ROOT,
                                   env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
                                   stdout=subprocess.PIPE, text=True)
        lines = iter(process.stdout.readline, "")
        assert any("views: compiled by XLA" in line for line in lines)
        begun = time.time()
        assert any(" kimg  accuracy" in line for line in lines)
        files = list((tmp_path / "cache").rglob("process-*/*.pb"))
        assert files
        new.append([file.stat().st_mtime >= begun for file in files])
        process.terminate()
        assert process.wait(60) == 143
        reports = next(folder.rglob("metrics.jsonl")).read_text().splitlines()
        results.append({tag: value for tag, value in json.loads(reports[0]).items() if tag != "images_per_s"})
    assert all(new[0]) and not any(new[1]) and not any(new[2])
    assert results[0] == results[1] == results[2]
