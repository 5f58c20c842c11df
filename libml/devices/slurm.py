"""SLURM: which processes a job has, from the variables that it sets for them. Plain functions of the environment.

TensorFlow's SlurmClusterResolver sorts hosts by name, node10 before node9: then its tasks are not SLURM's ranks.
"""
import itertools
import re
from collections.abc import Mapping

import numpy as np

from libml.errors import UserError

FIRST_PORT, PORTS = 12000, 20000  # below the range from which systems take ports for outgoing connections


def expand_hosts(expression: str) -> list[str]:
    """Expands a SLURM host list such as node[01-03,07],login or r[1-2]n[3-4] (the last bracket runs fastest)."""
    if not re.fullmatch(r"(?:[^,\[\]]|\[[^\[\]]+\])+(?:,(?:[^,\[\]]|\[[^\[\]]+\])+)*", expression):
        raise UserError(f"Malformed SLURM host list {expression!r}; expected something like node[01-03,07].")
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", expression):
        pieces = [[literal] if literal else _numbers(ranges)
                  for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item)]
        hosts += map("".join, itertools.product(*pieces))
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


def _number(environment: Mapping[str, str], *names: str, default: int = 0) -> int:
    name = next((name for name in names if environment.get(name)), "")
    if name and not re.fullmatch(r"\d{1,9}", environment[name]):
        raise UserError(f"{name}={environment[name]}: expected a whole number, as srun sets it.")
    return int(environment[name]) if name else default


def _per_node(environment: Mapping[str, str]) -> str:
    return environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or ""


def gpus_of_task(environment: Mapping[str, str], visible: int) -> slice:
    """Returns which of the visible GPUs are this task's: all, unless each task of a node sees those of all tasks."""
    counts = tasks_per_node(_per_node(environment) or "1")
    tasks = counts[min(_number(environment, "SLURM_NODEID"), len(counts) - 1)]
    on_node = _number(environment, "SLURM_GPUS_ON_NODE", default=visible)
    bound = environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == str(visible)  # such as a100:2
    if tasks == 1 or visible < 2 or visible < on_node or bound:
        return slice(visible)
    share = visible // tasks
    if not share:
        raise UserError(f"{tasks} tasks of this node see its {visible} GPUs: start as many tasks as there are GPUs, or "
                        "fewer.")
    first = _number(environment, "SLURM_LOCALID") * share
    return slice(first, first + share)


def slurm_cluster(environment: Mapping[str, str]) -> dict | None:
    """Derives a TF_CONFIG from the variables that srun sets for its tasks; None if there is one task or no SLURM.

    Needs SLURM's default (block) placement of tasks, and ports that jobs sharing a node do not both compute.
    """
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1)
    expression = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if tasks < 2 or not expression:
        return None
    hosts = expand_hosts(expression)
    per_node = _per_node(environment)
    counts = (tasks_per_node(per_node) if per_node
              else [len(share) for share in np.array_split(range(tasks), len(hosts))])
    port = FIRST_PORT + _number(environment, "SLURM_JOB_ID") % PORTS
    workers = [f"{host}:{port + i}" for host, count in zip(hosts, counts, strict=False) for i in range(count)]
    index = _number(environment, "SLURM_PROCID")
    if len(workers) != tasks or index >= tasks:
        raise UserError(f"SLURM names {tasks} tasks, of which this is number {index}, but {len(workers)} places in "
                        f"{expression} ({per_node}). Start the program with srun, or set TF_CONFIG.")
    return {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
