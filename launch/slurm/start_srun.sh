# One task for each rank: SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS say which.
start_ranks() {
    local step=(srun --kill-on-bad-exit=1 --wait=60 --nodes="$SLURM_NNODES" --ntasks-per-node="$tasks_per_node")
    step+=(--ntasks=$((SLURM_NNODES * tasks_per_node)) --cpus-per-task={{step_cpus_per_task}})
    step+=({{container}})
    # USR1 ends a program that does not expect it: until Python looks out for it, it is ignored
    "${step[@]}" bash -c 'trap "" USR1; exec "$@"' rank python {{script}} "${arguments[@]}"
}
