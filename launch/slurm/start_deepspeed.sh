# One task per node: the DeepSpeed launcher, which starts the ranks of the node.
start_ranks() {
    local host hostfile=$state/hostfile-$SLURM_JOB_ID
    scontrol show hostnames "$SLURM_JOB_NODELIST" |
        while read -r host; do echo "$host slots=$tasks_per_node"; done >"$hostfile"
    local step=(srun --kill-on-bad-exit=1 --wait=60 --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES")
    step+=(--ntasks-per-node=1 --cpus-per-task={{step_cpus_per_task}})
    step+=({{container}})
    # USR1 is meant for the ranks, which poll for it; it would end the launcher
    "${step[@]}" bash -c '
        trap "" USR1
        exec deepspeed --hostfile="$1" --no_ssh --node_rank="$SLURM_NODEID" \
            --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" "${@:2}"' \
        node "$hostfile" {{script}} "${arguments[@]}"
}
