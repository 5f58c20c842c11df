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


def slurm_cluster(environment: Mapping[str, str]) -> dict | None:
    """Derives a TF_CONFIG from the variables that srun sets for its tasks; None if there is one task or no SLURM.

    Needs SLURM's default (block) placement of tasks, and ports that jobs sharing a node do not both compute.
    """
    def number(*names: str, default: int) -> int:
        name = next((name for name in names if environment.get(name)), "")
        if name and not re.fullmatch(r"\d{1,9}", environment[name]):
            raise UserError(f"{name}={environment[name]}: expected a whole number, as srun sets it.")
        return int(environment[name]) if name else default

    tasks = number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1)
    expression = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if tasks < 2 or not expression:
        return None
    hosts = expand_hosts(expression)
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    counts = (tasks_per_node(per_node) if per_node
              else [len(share) for share in np.array_split(range(tasks), len(hosts))])
    port = FIRST_PORT + number("SLURM_JOB_ID", default=0) % PORTS
    workers = [f"{host}:{port + i}" for host, count in zip(hosts, counts, strict=False) for i in range(count)]
    index = number("SLURM_PROCID", default=0)
    if len(workers) != tasks or index >= tasks:
        raise UserError(f"SLURM names {tasks} tasks, of which this is number {index}, but {len(workers)} places in "
                        f"{expression} ({per_node}). Start the program with srun, or set TF_CONFIG.")
    return {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
