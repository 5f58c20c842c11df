#!/bin/bash
# One run on all GPUs of one node; arguments are the program's own:
#     sbatch scripts/slurm/one_node.sh -m cssl.cssl --dataset=cifar10.3@40-1
# Before the time limit and when preempted, the run saves its state and the job queues itself again and continues.
#SBATCH --job-name=cssl
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
STEP_OPTIONS=(--ntasks=1)
. "${SLURM_SUBMIT_DIR:-.}/cssl/tools/run_and_requeue.sh"
