# One task per rank; ranks read SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS.
start_ranks() {
    local step=(srun --kill-on-bad-exit=1 --wait=60 --nodes="$SLURM_NNODES" --ntasks-per-node="$tasks_per_node")
    step+=(--ntasks=$((SLURM_NNODES * tasks_per_node)) --cpus-per-task={{step_cpus_per_task}})
    step+=({{container}})
    # USR1 would end a program without a handler, so it is ignored until Python blocks it and polls for it
    "${step[@]}" bash -c 'trap "" USR1; exec "$@"' rank python {{script}} "${arguments[@]}"
}
