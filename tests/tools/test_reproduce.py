"""The runs behind the paper's tables: exact lists, what is missing, the SLURM script in a real shell."""
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from conftest import ROOT
from helpers import invoke, write_run

import cssl
from cssl import cli
from cssl.program import run_programs
from cssl.tools import reproduce
from libml.errors import UserError


def listed(*arguments):
    """The commands of a dry run, as dicts of their flags with the module under "module"."""
    commands = []
    for line in invoke("reproduce", "--dry_run", *arguments).stdout.splitlines():
        python, dash_m, module, *flags = shlex.split(line)
        assert (python, dash_m, module.split(".")[0]) == ("python", "-m", "cssl")
        commands.append({"module": module.split(".")[1], **dict(flag[2:].split("=", 1) for flag in flags)})
    return commands


def datasets(commands, module):
    return Counter(command["dataset"] for command in commands if command["module"] == module)


def names(sizes, seeds=5):
    return Counter(f"{dataset}.{seed}@{size}-1" for dataset, labels in sizes.items() for size in labels
                   for seed in range(1, seeds + 1))


BOTH = {"cifar10": (40, 4000), "svhn": (40, 1000)}


def test_results(tmp_path):
    commands = listed("--table=results", f"--train_dir={tmp_path}")
    everything = {"cifar10": (40, 250, 4000), "cifar100": (400, 2500, 10000), "svhn": (40, 250, 1000), "stl10": (1000,)}
    for module in ("cssl", "fixmatch", "mixmatch", "uda", "remixmatch"):
        assert datasets(commands, module) == names(everything)
    assert datasets(commands, "mean_teacher") == names({"cifar10": (250, 4000), "cifar100": (2500, 10000),
                                                        "svhn": (250, 1000)})
    assert datasets(commands, "comatch") == names({"cifar10": (40, 250)})
    assert datasets(commands, "alphamatch") == names({"cifar10": (40, 250), "cifar100": (400, 2500), "svhn": (40, 250),
                                                      "stl10": (1000,)})
    assert datasets(commands, "rerankmatch") == names({name: sizes for name, sizes in everything.items()
                                                       if name != "stl10"})
    assert datasets(commands, "enaet") == names({"cifar10": (250, 4000), "svhn": (250, 1000)})
    assert datasets(commands, "meta_pseudo_labels") == names({"cifar10": (4000,), "svhn": (1000,)})
    assert len(commands) == 400
    own = {"enaet": "131072", "meta_pseudo_labels": "37500"}  # the lengths of their authors' runs
    assert all(command["train_kimg"] == own.get(command["module"], "65536") for command in commands)
    assert not any("schedule_kimg" in command for command in commands)
    assert {command["confidence"] for command in commands if command["module"] == "fixmatch"} == {"0.95"}


@pytest.mark.parametrize(("table", "modules"), [("calibration", ("fixmatch", "fixmatch_da", "lsmatch", "cssl")),
                                                ("ups", ("fixmatch", "cssl", "upsmatch"))])
def test_calibration_and_ups(tmp_path, table, modules):
    commands = listed(f"--table={table}", f"--train_dir={tmp_path}")
    assert {command["module"] for command in commands} == set(modules)
    for module in modules:
        assert datasets(commands, module) == names(BOTH)
    assert {(c["train_kimg"], c["augment"]) for c in commands} == {("65536", "d.d.d")}


def test_efficiency_keeps_the_full_horizon(tmp_path):
    commands = listed("--table=efficiency", f"--train_dir={tmp_path}")
    assert {(c["dataset"].split(".")[0], c["train_kimg"], c["schedule_kimg"]) for c in commands} == {
        ("cifar10", "8192", "65536"), ("svhn", "2048", "65536")}
    variants = Counter((c["module"], c.get("confidence")) for c in commands)
    assert variants == {("fixmatch", "0.0"): 20, ("fixmatch", "0.8"): 20, ("fixmatch", "0.95"): 20,
                        ("lsmatch", None): 20, ("cssl", None): 20}


def test_ablation_and_barely(tmp_path):
    commands = listed("--table=ablation", f"--train_dir={tmp_path}")
    assert Counter(c["augment"] for c in commands) == {"d.d.d": 6, "d.d.ra": 6, "d.d.rac": 6}
    assert set(datasets(commands, "cssl")) == set(names({"cifar10": (40, 4000)}, seeds=3))
    assert {c["train_kimg"] for c in commands} == {"32768"}
    commands = listed("--table=barely", f"--train_dir={tmp_path}")
    assert Counter((c["module"], c.get("alpha_bound")) for c in commands) == {
        ("fixmatch", None): 10, ("lsmatch", None): 10, ("cssl", "0.0"): 10, ("cssl", "0.03"): 10}
    assert set(datasets(commands, "fixmatch")) == set(names({"cifar10": (10,), "svhn": (10,)}))
    assert {(c["train_kimg"], "schedule_kimg" in c) for c in commands} == {("32768", False)}


def test_all_lists_shared_runs_once(tmp_path):
    commands = listed("--table=all", f"--train_dir={tmp_path}")
    assert len({tuple(sorted(c.items())) for c in commands}) == len(commands)
    # 400 and, beyond them, FixMatch-DA and LSMatch (calibration), efficiency, ablation, barely, UPSMatch
    assert len(commands) == 400 + 40 + 100 + 18 + 40 + 20
    # Two runs in one folder must differ in something that the folder's name shows: never in length or horizon alone.
    places = Counter(tuple(sorted((k, v) for k, v in c.items() if k not in ("train_kimg", "schedule_kimg")))
                     for c in commands)
    assert max(places.values()) == 1


def test_filter_and_further_flags(tmp_path):
    commands = listed("--table=all", "--filter=cssl.cssl --dataset=svhn.2@40-1", f"--train_dir={tmp_path}", "--",
                      "--seed=7")
    assert [c["train_kimg"] for c in commands] == ["65536", "2048"]
    assert {c["seed"] for c in commands} == {"7"}
    shorter, = listed("--table=barely", "--filter=lsmatch --dataset=svhn.1@", f"--train_dir={tmp_path}", "--",
                      "--train_kimg=0.5", "--augment=d.d.x")
    assert (shorter["train_kimg"], shorter["augment"], shorter["train_dir"]) == ("0.5", "d.d.x", f"{tmp_path}/kimg0.5")
    with pytest.raises(UserError, match="contains --filter=nothing"):
        listed("--table=all", "--filter=nothing")
    with pytest.raises(UserError, match="expected --name=value"):
        listed("--table=all", "--", "seed")


def finish(command, **changes):
    """Writes the finished run of a listed command, with some flags changed; returns its folder."""
    command = {**command, **changes}
    method = cssl.method(command.pop("module"))
    config = cli.configuration(method, ["program", *(f"--{name}={value}" for name, value in command.items())])
    values, folder = config.values(), config.folder()
    write_run(folder.parent, [50] * int(values["train_kimg"]), **{**values, "method": method.__name__}).rename(folder)
    return folder


def test_only_what_is_missing(tmp_path):
    arguments = ("--table=efficiency", "--filter=fixmatch --dataset=svhn.1@40-1", f"--train_dir={tmp_path}", "--",
                 "--train_kimg=2", "--schedule_kimg=64")
    first, *others = listed(*arguments)
    assert len(others) == 2
    assert first["train_dir"] == str(tmp_path / "kimg2")
    for change in ({"module": "lsmatch"}, {"confidence": 0.5}, {"dataset": "svhn.1@40-2"}, {"filters": 16},
                   {"seed": 7}, {"rerun": "b"}, {"train_dir": tmp_path / "elsewhere"}):
        finish(first, **change)
    assert listed(*arguments) == [first, *others]
    for change in ({"train_kimg": 1}, {"schedule_kimg": 32}):  # in the same folder: shorter, or another cosine
        folder = finish(first, **change)
        assert listed(*arguments) == [first, *others]
        shutil.rmtree(folder)
    finish(first)
    assert listed(*arguments) == others
    assert "1 of 3 runs are finished" in invoke("reproduce", "--dry_run", *arguments).stderr
    assert listed(*arguments, "--filters=8") and len(listed(*arguments, "--seed=3")) == 3
    with pytest.raises(UserError, match="Unknown command line flag 'filter'"):
        listed(*arguments, "--filter=8")


@pytest.fixture
def programs(tmp_path):
    """A folder with programs that write down how they were called instead of training or talking to SLURM."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").write_text('#!/bin/bash\ntrap "echo saved >> $LOG; exit 143" TERM\necho $$ > "$LOG.pid"\n'
                                   'echo "$@" >> "$LOG"\n${ENDING:-exit 0}\n')
    (folder / "srun").write_text('#!/bin/bash\necho srun "$1" $SRUN_CPUS_PER_TASK >> "$LOG"\nexec "${@:2}"\n')
    (folder / "scontrol").write_text('#!/bin/bash\necho scontrol "$@" >> "$LOG"\n')
    for program in folder.iterdir():
        program.chmod(0o755)
    return folder


def slurm_environment(programs, log, **more):
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "LOG": str(log), "SLURM_JOB_ID": "8",
            "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "1", **more}


def test_slurm_script(tmp_path, programs, monkeypatch):
    script, log = tmp_path / "jobs.sbatch", tmp_path / "log"
    (tmp_path / "here/.venv/bin").mkdir(parents=True)
    (tmp_path / "here/.venv/bin/activate").write_text('echo activated >> "$LOG"\n')
    monkeypatch.chdir(tmp_path / "here")
    arguments = ("--table=barely", "--filter=svhn.1@10-1", f"--train_dir={tmp_path}/my runs")
    done = invoke("reproduce", *arguments, f"--slurm={script}")
    assert done.stdout.strip() == f"{script}: 4 tasks"
    invoke("reproduce", *arguments, f"--slurm={script}")
    text = script.read_text()
    script.write_text(text.replace("--time=24", "--partition=a100 --time=24"))
    with pytest.raises(UserError, match="jobs.sbatch was not written by this command"):
        invoke("reproduce", *arguments, f"--slurm={script}")
    assert "#SBATCH --array=0-3\n" in text and "#SBATCH --requeue" in text
    environment = slurm_environment(programs, log, SLURM_SUBMIT_DIR="/", SLURM_CPUS_PER_TASK="8")
    subprocess.run(["bash", script], env=environment, check=True, timeout=20)
    second = invoke("reproduce", *arguments, "--dry_run").stdout.splitlines()[1]
    assert log.read_text().split() == ["activated", "srun", "--ntasks=1", "8",
                                       *shlex.join(shlex.split(second)[1:]).replace("'", "").split()]


def test_the_script_says_nothing_that_its_name_says(tmp_path, programs, program, monkeypatch):
    """A new line in a name would end the comment that has it."""
    monkeypatch.chdir(tmp_path)  # where the script would look for .venv, whose python is no stand-in
    script, log = tmp_path / "a\ntouch evil; exit 3\n.sbatch", tmp_path / "log"
    done = program(reproduce.main, "--table=barely", "--filter=svhn.1@10-1", f"--slurm={script}")
    assert len(done.stdout.splitlines()) == 1
    subprocess.run(["bash", script], env=slurm_environment(programs, log), check=True, timeout=20)
    assert not (tmp_path / "evil").exists() and "cssl.lsmatch" in log.read_text()


def test_a_dry_run_writes_nothing(tmp_path, program, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = program(reproduce.main, "--table=barely", "--dry_run", "--slurm=jobs.sbatch", code=2)
    assert "--slurm: not allowed with argument --dry_run" in done.stderr and not os.listdir(tmp_path)


@pytest.mark.parametrize(("ending", "code", "last"), [
    ("exit 2", 2, []), ("exit 75", 0, ["scontrol requeue 9_1"]), ("wait", 0, ["saved", "scontrol requeue 9_1"])])
def test_slurm_tasks_end_or_queue_again(tmp_path, programs, monkeypatch, ending, code, last):
    """By exit code; in the last case the task is preempted: TERM to the script and its step."""
    script, log, process = tmp_path / "jobs.sbatch", tmp_path / "log", tmp_path / "log.pid"
    monkeypatch.chdir(tmp_path)
    invoke("reproduce", "--table=barely", "--filter=svhn.1@10-1", f"--train_dir={tmp_path}", f"--slurm={script}")
    step = "eval for i in {1..400}; do sleep 0.05; done" if ending == "wait" else ending
    with subprocess.Popen(["bash", script], env=slurm_environment(programs, log, ENDING=step)) as shell:
        deadline = time.time() + 20
        while ending == "wait" and time.time() < deadline:
            if log.exists() and "lsmatch" in log.read_text():
                shell.send_signal(signal.SIGTERM)
                os.kill(int(process.read_text()), signal.SIGTERM)
                break
            time.sleep(0.05)
        assert shell.wait(timeout=20) == code
    assert log.read_text().splitlines()[2:] == last


def test_runs_follow_one_another_and_failures_are_named(tmp_path, monkeypatch, programs):
    log = tmp_path / "log"
    for name, value in slurm_environment(programs, log).items():
        monkeypatch.setenv(name, value)
    (programs / "python").write_text('#!/bin/bash\necho "$@" >> "$LOG"\n[[ "$@" != *lsmatch* ]]\n')
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    done = invoke("reproduce", "--table=barely", "--filter=svhn.1@10-1", f"--train_dir={tmp_path}")
    assert done.code == 1
    assert [line.split()[1] for line in log.read_text().splitlines()] == ["cssl.fixmatch", "cssl.lsmatch", "cssl.cssl",
                                                                         "cssl.cssl"]
    assert "failed: python -m cssl.lsmatch" in done.stderr and "cssl.cssl" not in done.stderr


def test_several_runs_at_once_share_the_cores(tmp_path, monkeypatch, programs):
    """Two cores, or as many as there are: each program waits for its neighbour, and sees its own core alone."""
    cores = min(2, len(os.sched_getaffinity(0)))
    (programs / "python").write_text(
        '#!/bin/bash\necho $$ $(python3 -c "import os; print(*os.sched_getaffinity(0))") >> "$LOG"\necho noise\n'
        f'for i in {{1..600}}; do [ $(wc -l < "$LOG") -ge {cores} ] && break; sleep 0.05; done\n'
        'if [[ "$@" == *lsmatch* ]]; then echo the reason >&2; exit 3; fi\n')
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    arguments = ("--table=barely", "--filter=svhn.1@10-1", f"--train_dir={tmp_path}")
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(affinity)[:cores])
    try:
        done = invoke("reproduce", *arguments, f"--at_once={cores}")
        with pytest.raises(UserError, match=f"--at_once={cores + 1}: expected 1 to {cores}"):
            invoke("reproduce", *arguments, f"--at_once={cores + 1}")
    finally:
        os.sched_setaffinity(0, affinity)
    used = [line.split()[1:] for line in (tmp_path / "log").read_text().splitlines()]
    assert len(used) == 4 and sorted(used[:cores]) == sorted([str(core)] for core in sorted(affinity)[:cores])
    assert done.code == 1 and "[4/4]" in done.stdout and "noise" not in done.stdout
    assert cores == 1 or done.stderr.index("the reason") < done.stderr.index("failed: python -m cssl.lsmatch")


def test_a_signal_reaches_the_run_which_saves(tmp_path, programs):
    """SIGTERM to the script alone, SIGINT as a terminal sends it, to both: the run ends by itself, no other follows."""
    log = tmp_path / "log"
    (programs / "python").write_text(
        '#!/bin/bash\ntrap "sleep 0.5; echo saved >> $LOG; exit 143" TERM\ntrap "sleep 0.5; echo saved >> $LOG; '
        'exit 130" INT\necho started >> "$LOG"\nfor i in {1..200}; do sleep 0.1; done\n')
    program = (f"import sys; sys.argv = ['reproduce', '--table=barely', '--train_dir={tmp_path}']; "
               f"from cssl.tools import reproduce; sys.executable = '{programs / 'python'}'; "
               "sys.exit(reproduce.main())")
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        log.write_text("")
        process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, start_new_session=True,
                                   env={**os.environ, "LOG": str(log)}, stderr=subprocess.PIPE, text=True)
        while "started" not in log.read_text() and process.poll() is None:
            time.sleep(0.05)
        if number == signal.SIGTERM:
            process.send_signal(number)
        else:
            os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == code and "Traceback" not in errors, errors
        assert log.read_text().split() == ["started", "saved"]


def test_a_signal_is_not_lost_while_a_program_starts(tmp_path):
    """It comes between the start of the program and the moment when this process knows of it."""
    # Runs in the new process while the old one waits inside of Popen for the program to begin.
    codes = run_programs(1, lambda _: subprocess.Popen(
        ["bash", "-c", f"sleep 20; touch {tmp_path}/ended"],
        preexec_fn=lambda: os.kill(os.getppid(), signal.SIGTERM)))
    assert codes == {0: 143} and not (tmp_path / "ended").exists()
    assert run_programs(1, lambda _: subprocess.Popen(["bash", "-c", "exit 3"])) == {0: 3}


@pytest.mark.parametrize("to_all", [True, False])
def test_a_signal_stops_all_that_run_and_what_waits(to_all):
    def start(number):
        program = 'trap "exit 143" TERM; echo ready; for i in {1..200}; do sleep 0.1; done'
        process = subprocess.Popen(["bash", "-c", program], stdout=subprocess.PIPE)
        process.stdout.readline()
        if number == 1:
            os.kill(os.getpid() if to_all else process.pid, signal.SIGTERM)
        return process

    begun = time.time()
    assert run_programs(4, start, at_once=2) == dict.fromkeys(range(4), 143)
    assert time.time() - begun < 15


def test_from_the_command_line(command, tmp_path):
    done = command("cssl-reproduce", "--table=results", "--dry_run", f"--train_dir={tmp_path}")
    assert len(done.stdout.splitlines()) == 400
    assert "reconstructions, whose results are compared with no figure of the paper: ReRankMatch" in done.stderr
    assert ("python -m cssl.enaet --dataset=svhn.5@1000-1 --train_dir="
            f"{tmp_path}/kimg131072 --train_kimg=131072") in done.stdout
    assert f"cssl.meta_pseudo_labels --dataset=cifar10.1@4000-1 --train_dir={tmp_path}/kimg37500" in done.stdout
