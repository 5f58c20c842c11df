#!/bin/bash
# One run on all GPUs of several nodes, one process per node; arguments are the program's own:
#     sbatch --nodes=4 scripts/slurm/several_nodes.sh -m cssl.cssl --dataset=cifar100.1@400-1 --train_dir=/shared/runs
# --train_dir must be on a file system that all nodes share. --batch must divide by the number of GPUs. The processes
# find one another through SLURM's variables. When one node is preempted or fails, all end, and the job queues itself
# again and continues from the last checkpoint.
#SBATCH --job-name=cssl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
# Processes that lose one another say so and end by themselves; --wait is for those that cannot.
STEP_OPTIONS=(--distribution=block --kill-on-bad-exit=0 --wait=120)
. "${SLURM_SUBMIT_DIR:-.}/cssl/tools/run_and_requeue.sh"
