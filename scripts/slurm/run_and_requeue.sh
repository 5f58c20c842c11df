# Sourced by the job scripts: runs python with the script's arguments as a job step; queues the job again if the step
# was told to stop (exit code 143) or lost another process (75). Any other code ends the job with that code.
cd "${SLURM_SUBMIT_DIR:-.}" || exit 1
[ -f .venv/bin/activate ] && . .venv/bin/activate
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
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
fi
exit "$code"
