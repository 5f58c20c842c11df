"""Where a run computes: one device, all devices of a machine, or several machines; and what its processes agree on."""
import faulthandler
import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from libml.errors import UserError
from libml.options import option

FIRST_PORT, PORTS = 12000, 20000  # below the range from which systems take ports for outgoing connections
START_SECONDS = 600
POLICIES = {"off": "float32", "float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}  # Keras's names


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """Devices, machines and precision."""

    strategy: str = option("auto", "one device, all devices of this machine (mirrored), several machines "
                           "(multiworker); auto: what TF_CONFIG, SLURM and the visible GPUs say",
                           choices=("auto", "one", "mirrored", "multiworker"))
    num_devices: int = option(0, "devices per process; 0: all visible GPUs, or one CPU. Without GPUs: logical CPU "
                              "devices (with multiworker always one)")
    mixed_precision: str = option("off", "compute in half precision, keep weights, statistics, losses in float32",
                                  choices=("off", "float16", "bfloat16"))
    jit: bool = option(False, "compile forward and backward pass with XLA")
    sync_bn: bool = option(False, "batch normalisation over all replicas' images instead of each replica's own")
    deterministic: bool = option(False, "only operations that repeat bit by bit, also on GPUs (slower there)")


class WorkerLost(UserError):
    """Another process of the run is gone."""

    exit_code = 75  # "try again later": the same command continues


# Clusters: plain functions of the environment.

def expand_hosts(expression: str) -> list[str]:
    """Expands a SLURM host list such as node[01-03,07],login or r[1-2]n[3-4] (the last bracket runs fastest)."""
    if not re.fullmatch(r"(?:[^,\[\]]|\[[^\[\]]+\])+(?:,(?:[^,\[\]]|\[[^\[\]]+\])+)*", expression):
        raise UserError(f"Malformed SLURM host list {expression!r}; expected something like node[01-03,07].")
    hosts = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", expression):
        names = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
            names = [name + piece for name in names for piece in ([literal] if literal else _numbers(ranges))]
        hosts += names
    return hosts


def _numbers(ranges: str) -> list[str]:
    numbers = []
    for piece in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"Malformed range {piece!r} in a SLURM host list; expected something like 01-03.")
        low, high = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers


def tasks_per_node(expression: str) -> list[int]:
    """Expands SLURM's count of tasks per node, such as 2(x3),1."""
    counts = []
    for piece in expression.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece)
        if not match:
            raise UserError(f"Malformed SLURM_TASKS_PER_NODE {expression!r}; expected something like 2(x3),1.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def slurm_cluster(environment: Mapping[str, str]) -> dict | None:
    """Derives a TF_CONFIG from the variables that srun sets for its tasks; None if there is one task or no SLURM.

    Needs SLURM's default (block) placement of tasks, and ports that jobs sharing a node do not both compute.
    """
    def get(name):
        return environment.get(f"SLURM_STEP_{name}") or environment.get(f"SLURM_{name}")

    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1)
    expression = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if tasks < 2 or not expression:
        return None
    hosts = expand_hosts(expression)
    per_node = get("TASKS_PER_NODE")
    counts = tasks_per_node(per_node) if per_node else [len(part) for part in np.array_split(range(tasks), len(hosts))]
    port = FIRST_PORT + int(environment.get("SLURM_JOB_ID", 0)) % PORTS
    workers = [f"{host}:{port + i}" for host, count in zip(hosts, counts, strict=False) for i in range(count)]
    index = int(environment.get("SLURM_PROCID", 0))
    if len(workers) != tasks or index >= tasks:
        raise UserError(f"SLURM names {tasks} tasks, of which this is number {index}, but {len(workers)} places in "
                        f"{expression} ({per_node}). Start the program with srun, or set TF_CONFIG.")
    return {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}


def find_cluster(strategy: str, environment: Mapping[str, str]) -> dict | None:
    """Returns the cluster of this process in the form of TF_CONFIG, or None where the run has only one process."""
    if strategy in ("one", "mirrored"):
        return None
    text = environment.get("TF_CONFIG", "").strip()
    cluster = None
    if text:
        try:
            cluster = json.loads(text)
            jobs, task = cluster.get("cluster", {}), cluster.get("task", {})
            if jobs and not 0 <= int(task["index"]) < len(jobs[task["type"]]):
                raise KeyError(task["index"])
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


# Strategies.

def create_strategy(options: ScaleOptions, cluster: dict | None) -> tf.distribute.Strategy:
    """Creates the strategy; must be the first thing in a process that makes TensorFlow use its devices."""
    if options.num_devices < 0:
        raise UserError(f"--num_devices={options.num_devices}: expected 0 or more.")
    if options.deterministic:
        tf.config.experimental.enable_op_determinism()
    gpus = tf.config.list_physical_devices("GPU")
    if options.num_devices > len(gpus) > 0:
        raise UserError(f"--num_devices={options.num_devices}, but {len(gpus)} GPUs are visible.")
    count = 1 if options.strategy == "one" else options.num_devices or len(gpus) or 1
    if options.strategy == "one" and options.num_devices > 1:
        raise UserError(f"--strategy=one uses one device, not --num_devices={options.num_devices}.")
    if gpus:
        tf.config.set_visible_devices(gpus[:count], "GPU")
        for gpu in gpus[:count]:
            tf.config.experimental.set_memory_growth(gpu, True)
    if cluster:
        if not gpus and options.num_devices > 1:
            raise UserError(f"--num_devices={options.num_devices}: without GPUs every process of a cluster has one "
                            "device; start more processes.")
        return _multi_worker(cluster, len(gpus[:count]))
    if not gpus and count > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    if count == 1 and options.strategy != "mirrored":
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy([f"{'GPU' if gpus else 'CPU'}:{i}" for i in range(count)])


def _multi_worker(cluster: dict, gpus: int) -> tf.distribute.Strategy:
    task = cluster["task"]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster["cluster"]), task_type=task["type"], task_id=int(task["index"]),
        num_accelerators={"GPU": gpus}, rpc_layer="grpc")
    print(f"Waiting up to {START_SECONDS} s for all of {cluster['cluster']}", file=sys.stderr, flush=True)
    # TensorFlow would wait for an hour, deaf to signals and holding Python's lock; faulthandler needs no lock.
    faulthandler.dump_traceback_later(START_SECONDS, exit=True)
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    finally:
        faulthandler.cancel_dump_traceback_later()


def worker_index(strategy: tf.distribute.Strategy) -> int:
    """Number of this process among those of the run; the chief is 0."""
    resolver = strategy.cluster_resolver
    if resolver is None or not resolver.task_type:
        return 0
    offset = len(resolver.cluster_spec().as_dict().get("chief", ())) if resolver.task_type == "worker" else 0
    return offset + resolver.task_id


def worker_count(strategy: tf.distribute.Strategy) -> int:
    """Number of processes of the run."""
    resolver = strategy.cluster_resolver
    jobs = {} if resolver is None else resolver.cluster_spec().as_dict()
    return max(1, sum(len(jobs.get(job, ())) for job in ("chief", "worker")))


class Council:
    """Lets the processes of a run agree: each call waits for all of them and tells each what all have said."""

    def __init__(self, strategy: tf.distribute.Strategy):
        self.workers, self.index = worker_count(strategy), worker_index(strategy)
        replicas = strategy.num_replicas_in_sync
        self._devices = replicas // self.workers

        def share(values: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            place = tf.one_hot(context.replica_id_in_sync_group, replicas, dtype=values.dtype)
            return context.all_reduce(tf.distribute.ReduceOp.SUM, place[:, None] * values)

        @tf.function
        def run(values):
            return strategy.experimental_local_results(strategy.run(share, args=(values,)))[0]

        self._run = run

    def part(self) -> None:
        """Waits for all processes a last time; one that has left already does not matter any more."""
        with suppress(tf.errors.OpError):
            self.hear(0)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What only some processes do, such as reading a file: a UserError of one stops them all, each saying so."""
        failure = None
        try:
            yield
        except UserError as error:
            failure = error
        failed = np.flatnonzero(self.hear(failure is not None)[:, 0])
        if failure is not None:
            raise failure
        if len(failed):
            raise UserError(f"Worker {', '.join(map(str, failed))} met an error that ends the run: see its output.")

    def hear(self, *values: float) -> np.ndarray:
        """Returns the values of all processes, [workers, values]; all must call with as many."""
        if self.workers == 1:
            return np.array([values], np.float64)
        return self._run(tf.constant(values, tf.float64)).numpy()[::self._devices]


def check_jit(options: ScaleOptions, replicas: int) -> None:
    """Raises UserError where XLA would have to compile communication between replicas."""
    if options.jit and options.sync_bn and replicas > 1:
        raise UserError(f"--jit cannot compile --sync_bn's communication between {replicas} replicas; leave out one of "
                        "the two.")


def check_same(strategy: tf.distribute.Strategy, config: dict) -> None:
    """Raises UserError on all processes unless all were started with the same configuration."""
    numbers = Council(strategy).hear(zlib.crc32(json.dumps(config, sort_keys=True).encode()))[:, 0]
    if (numbers != numbers[0]).any():
        others = [str(i) for i, number in enumerate(numbers) if number != numbers[0]]
        raise UserError(f"Worker {', '.join(others)} was started with other flags than worker 0; all need the same.")


@contextmanager
def watch(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Turns the errors that TensorFlow raises when another process is gone into one clear line."""
    try:
        yield
    except tf.errors.OpError as error:
        if worker_count(strategy) == 1:
            raise
        reason = error.message.strip().splitlines()[0][:150]
        raise WorkerLost(f"Worker {worker_index(strategy)} lost touch with another process of the run, which ended or "
                         f"cannot be reached ({reason}). Start all of them again: the same command continues from the "
                         "last checkpoint.") from error
