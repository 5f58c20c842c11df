# Sourced by the job scripts, part of those that cssl-reproduce writes: runs python with the script's arguments as a job
# step; queues the job, or task of an array, again if the step was told to stop (exit code 143) or lost another process
# (75). Any other code ends it with that code.
cd "${SLURM_SUBMIT_DIR:-.}" || exit 1
[ -f .venv/bin/activate ] && . .venv/bin/activate
# Since SLURM 22.05 a step does not get the job's CPUs by itself.
[ -n "$SLURM_CPUS_PER_TASK" ] && export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
trap 'true' TERM # SLURM signals the step too: let it save, then look at its exit code
srun "${STEP_OPTIONS[@]}" python "$@" &
step=$!
wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do # the signal had interrupted wait
  wait "$step"
  code=$?
done
if [ "$code" -eq 143 ] || [ "$code" -eq 75 ]; then
  task=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID} # a task's number alone may mean the whole array
  scontrol requeue "${task:-$SLURM_JOB_ID}"
  exit 0
fi
exit "$code"
