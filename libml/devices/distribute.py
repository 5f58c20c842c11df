"""Where a run computes: one device, all devices of a machine, or several machines; and what its processes agree on."""
import functools
import json
import os
import re
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from libml.config import ScaleOptions
from libml.devices import machine
from libml.devices.slurm import gpus_of_task, slurm_cluster
from libml.errors import UserError

if TYPE_CHECKING:
    from libml.learn.model import SSLModel

START_SECONDS = 600
FIRST_SECONDS, HANG_SECONDS = 1800, 120  # at least, for what is done for the first time, and again
_WATCHDOG = """
import os, sys, time
parent, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while os.getppid() == parent:
    time.sleep(0.2)
    if time.monotonic() > end:
        print(sys.argv[3], file=sys.stderr, flush=True)
        os.kill(parent, 9)
"""
POLICIES = {"off": "float32", "float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}  # Keras's names
AMPERE = (8, 0)  # the first of NVIDIA's GPUs that are fast at bfloat16

# What TensorFlow raises when another process is gone. Faults of cuDNN and XLA are of the last two kinds, too, so that
# of these a line must speak of peers: not one of those that say where in the program it was.
LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)
PERHAPS_LOST = (tf.errors.InternalError, tf.errors.UnknownError)
PEERS = re.compile(r"^(?!\s*(?:File |\[\[|Detected at )).*(?:collective|nccl|\bpeer\b(?! access)|connection|socket|"
                   r"\bg?rpc\b|stream removed|heartbeat|coordination)", re.I | re.M)


class WorkerLost(UserError):
    exit_code = 75  # "try again later": the same command continues


def find_cluster(strategy: str, environment: Mapping[str, str]) -> dict | None:
    """Returns the cluster of this process in the form of TF_CONFIG, or None where the run has only one process."""
    if strategy in ("one", "mirrored"):
        return None
    text = environment.get("TF_CONFIG", "").strip()
    cluster = None
    if text:
        try:
            cluster = dict(json.loads(text))
            _check_jobs(cluster.get("cluster", {}), cluster.get("task", {}))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"TF_CONFIG is not usable ({type(error).__name__}: {error}); expected something like "
                            '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}.') \
                from error
    elif strategy == "multiworker" or "SLURM_STEP_NODELIST" in environment:  # a batch script itself is not a task
        cluster = slurm_cluster(environment)
    jobs = (cluster or {}).get("cluster", {})
    if sum(len(jobs.get(job, ())) for job in ("chief", "worker")) > 1:
        return cluster
    if strategy == "multiworker":
        raise UserError("--strategy=multiworker finds no cluster of several processes: set TF_CONFIG, or start with "
                        "srun under SLURM.")
    return None


def _check_jobs(jobs: dict, task: dict) -> None:
    """Raises an error that `find_cluster` catches unless this is nothing, or workers and at most one chief."""
    if jobs == {}:
        return
    unknown = sorted({*jobs, task["type"]} - {"chief", "worker"})
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no job of this program, which has workers and at most one chief")
    everyone = [host for hosts in jobs.values() for host in hosts]
    for host in everyone:
        if not re.fullmatch(r".+:\d{1,5}", host) or not 0 < int(host.rpartition(":")[2]) < 65536:
            raise ValueError(f"{host!r} is not host:port")
    if len(set(everyone)) < len(everyone):
        raise ValueError("a host:port stands there twice")
    if not 0 <= int(task["index"]) < len(jobs[task["type"]]):
        raise KeyError(task["index"])


def policy(options: ScaleOptions) -> str:
    """Returns Keras's name of the precision of layers, on these devices where that is to decide."""
    precision, gpus = options.mixed_precision, tf.config.get_visible_devices("GPU")
    if precision == "auto":
        details = map(tf.config.experimental.get_device_details, gpus)
        fast = (all(found.get("compute_capability", (0, 0)) >= AMPERE for found in details) if gpus
                else machine.fast_at_bfloat16())
        precision = "bfloat16" if fast else "off"
    return POLICIES[precision]


def onednn_is_on() -> bool:
    """Whether convolutions on this machine run on oneDNN, which is settled when TensorFlow is imported."""
    from tensorflow.python.util import _pywrap_util_port  # nothing public tells

    return bool(_pywrap_util_port.IsMklEnabled()) and not tf.config.list_physical_devices("GPU")


def communication(options: ScaleOptions, gpus: int) -> str:
    """Returns by what replicas exchange: TensorFlow itself would not take NCCL between machines."""
    if options.communication == "nccl" and not gpus:
        raise UserError("--communication=nccl: this process sees no GPU, without which there is no NCCL; leave it out.")
    return options.communication if options.communication != "auto" else "nccl" if gpus else "ring"


def create_strategy(options: ScaleOptions, environment: Mapping[str, str] | None = None) -> tf.distribute.Strategy:
    """Creates the strategy; must be the first thing in a process that makes TensorFlow use its devices.

    Runs of one process share it: those of two strategies would take each other's tensors for their own.
    """
    environment = environment or {}
    if options.deterministic:
        tf.config.experimental.enable_op_determinism()  # of XLA, too
    if not options.tf32:
        tf.config.experimental.enable_tensor_float_32_execution(False)
    cluster = find_cluster(options.strategy, environment)
    gpus = tf.config.list_physical_devices("GPU")
    if cluster:
        gpus = gpus[gpus_of_task(environment, len(gpus))]
    if options.num_devices > len(gpus) > 0:
        raise UserError(f"--num_devices={options.num_devices}, but {len(gpus)} GPUs are visible.")
    count = 1 if options.strategy == "one" else options.num_devices or len(gpus) or 1
    if options.strategy == "one" and options.num_devices > 1:
        raise UserError(f"--strategy=one uses one device, not --num_devices={options.num_devices}.")
    with suppress(RuntimeError):  # a Python program has used its devices before, as they are
        tf.config.set_visible_devices(gpus[:count], "GPU")
        for gpu in gpus[:count]:
            tf.config.experimental.set_memory_growth(gpu, True)
    if cluster:
        if not gpus and options.num_devices > 1:
            raise UserError(f"--num_devices={options.num_devices}: without GPUs every process of a cluster has one "
                            "device; start more processes.")
        return _multi_worker(json.dumps(cluster), len(gpus[:count]), communication(options, len(gpus)))
    if not gpus and count > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        with suppress(RuntimeError):
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
        if len(tf.config.list_logical_devices("CPU")) < count:
            raise UserError(f"--num_devices={count}: this program has used TensorFlow before, with fewer logical CPUs; "
                            "train in a program of its own.")
    if count == 1 and options.strategy != "mirrored":
        return tf.distribute.get_strategy()
    return _mirrored(tuple(f"{'GPU' if gpus else 'CPU'}:{i}" for i in range(count)), communication(options, len(gpus)))


@functools.cache
def _mirrored(devices: tuple[str, ...], by: str) -> tf.distribute.Strategy:
    # Groups of other devices need other keys; TensorFlow knows no public way to them.
    tf.distribute.MirroredStrategy._collective_key_base = 1000 * _mirrored.cache_info().currsize
    # (Hierarchical copies, which TensorFlow has as well, leave out the last of an odd number of GPUs.)
    without_nccl = tf.distribute.ReductionToOneDevice() if by == "ring" and devices[0].startswith("GPU") else None
    return tf.distribute.MirroredStrategy(devices, without_nccl)


@functools.cache
def _multi_worker(text: str, gpus: int, by: str) -> tf.distribute.Strategy:
    cluster = json.loads(text)
    task = cluster["task"]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster["cluster"]), task_type=task["type"], task_id=int(task["index"]),
        num_accelerators={"GPU": gpus}, rpc_layer="grpc")
    print(f"Waiting up to {START_SECONDS} s for all of {cluster['cluster']}, to communicate by {by}", file=sys.stderr,
          flush=True)
    message = (f"error: Not all processes of {cluster['cluster']} appeared within {START_SECONDS} s. Start them all, "
               "with addresses that they can reach.")
    # TensorFlow would wait for an hour, deaf to signals and holding Python's lock: only another process can end it.
    watchdog = subprocess.Popen([sys.executable, "-c", _WATCHDOG, str(os.getpid()), str(START_SECONDS), message],
                                start_new_session=True)  # what ends this process's group must not end it first
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(resolver, tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation[by.upper()]))
    except RuntimeError as error:  # TensorFlow has been used; or this process was in another cluster before
        raise UserError(f"This program cannot join {cluster['cluster']} any more ({error}): train in a program of its "
                        "own.") from error
    finally:
        watchdog.kill()
        watchdog.wait()


class ProcessGroup:
    """The processes of a run: how many (`size`), which this one is (`rank`, 0 the chief), what they exchange."""

    def __init__(self, strategy: tf.distribute.Strategy):
        resolver = strategy.cluster_resolver
        jobs = resolver.cluster_spec().as_dict() if resolver else {}
        chiefs, workers = len(jobs.get("chief", ())), len(jobs.get("worker", ()))
        self.size, self.rank = max(1, chiefs + workers), 0
        if jobs:
            self.rank = resolver.task_id + (chiefs if resolver.task_type == "worker" else 0)
        self.replicas = replicas = strategy.num_replicas_in_sync

        def share(values: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            place = tf.one_hot(context.replica_id_in_sync_group, replicas, dtype=values.dtype)
            return context.all_reduce(tf.distribute.ReduceOp.SUM, place[:, None] * values)

        self._run = tf.function(lambda values: strategy.experimental_local_results(
            strategy.run(share, args=(values,)))[0], autograph=False)
        self._longest: dict[str, float] = {}  # seconds that one of something has taken

    def all_gather(self, *values: float) -> np.ndarray:
        """Returns the values of all processes, [processes, values]; waits for all, which must call with as many."""
        if self.size == 1:
            return np.array([values], np.float64)
        # Before the first update others may still read their data, and between updates write files or call hooks.
        with self.expected("the other processes", least=FIRST_SECONDS) if self._longest else nullcontext():
            return self._run(tf.constant(values, tf.float64)).numpy()[::self.replicas // self.size]

    def check_same(self, facts: dict | list) -> None:
        """Raises UserError on all processes unless all have the same facts of configuration and data."""
        numbers = self.all_gather(zlib.crc32(json.dumps(facts, sort_keys=True).encode()))[:, 0]
        if (numbers != numbers[0]).any():
            self.final_barrier()
            others = [str(i) for i, number in enumerate(numbers) if number != numbers[0]]
            raise UserError(f"Worker {', '.join(others)} was started with other flags than worker 0, or sees other "
                            "images; all need the same.")

    def final_barrier(self) -> None:
        """Waits for all processes a last time; one that has left already does not matter any more."""
        with suppress(tf.errors.OpError):
            self.all_gather(0)

    @contextmanager
    def errors_stop_all(self) -> Iterator[None]:
        """For what only some processes do, such as writing a file: a UserError of one stops all, each saying so."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        failed = np.flatnonzero(self.all_gather(failure is not None)[:, 0])
        if len(failed):
            self.final_barrier()  # who ends at once may end before others have heard of it
        if failure is not None:
            raise failure
        if len(failed):
            raise UserError(f"Worker {', '.join(map(str, failed))} met an error that ends the run: see its output.")

    @contextmanager
    def expected(self, what: str, count: int = 1, least: float = HANG_SECONDS) -> Iterator[None]:
        """For what all replicas do together: ends this process if it takes ten times as long as it ever has.

        A peer that hangs within NCCL is told of by nobody, and nothing but the end of the process leaves such a call.
        """
        limit = max(least, 10 * count * self._longest[what]) if what in self._longest else FIRST_SECONDS
        timer = threading.Timer(limit, self._give_up, (what, limit))
        timer.daemon, started = True, time.monotonic()
        if self.replicas > 1:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
        self._longest[what] = max(self._longest.get(what, 0.0), (time.monotonic() - started) / count)

    def _give_up(self, what: str, seconds: float) -> None:
        who, start = ("another process of the run hangs, or the network does", "all of them") if self.size > 1 else (
            "a device hangs, or what devices exchange by (--communication=ring does without NCCL)", "it")
        print(f"error: Worker {self.rank} has waited {seconds:.0f} s for {what}: {who}. Start {start} again: the same "
              "command continues from the last checkpoint.", file=sys.stderr, flush=True)
        os._exit(WorkerLost.exit_code)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turns the errors of a lost process, or of an operation that does not repeat bit by bit, into one line."""
        try:
            yield
        except (tf.errors.UnimplementedError, RuntimeError) as error:
            reason = next((line for line in str(error).splitlines() if "determinis" in line), None)
            if reason is None:
                raise
            raise UserError(f"--deterministic: an operation of this run has no form that repeats bit by bit ("
                            f"{reason.strip()[:200]}). Leave the flag out, or take another network.") from error
        except (*LOST, *PERHAPS_LOST) as error:
            if self.size == 1 or isinstance(error, PERHAPS_LOST) and not PEERS.search(error.message):
                raise
            reason = error.message.strip().splitlines()[0][:150]
            raise WorkerLost(f"Worker {self.rank} lost touch with another process of the run, which ended or cannot be "
                             f"reached ({reason}). Start all of them again: the same command continues from the last "
                             "checkpoint.") from error


def check_jit(options: ScaleOptions, replicas: int, method: "type[SSLModel]") -> None:
    """Raises UserError where XLA would have to compile communication between replicas."""
    if options.jit and replicas > 1 and (method.communicates or options.sync_bn):
        whose = f"{method.__name__}'s" if method.communicates else "--sync_bn's"
        raise UserError(f"--jit cannot compile {whose} communication between {replicas} replicas; leave it out.")
