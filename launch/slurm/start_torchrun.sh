# One task per node: torchrun, which starts the ranks of the node.
start_ranks() {
    local step=(srun --kill-on-bad-exit=1 --wait=60 --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES")
    step+=(--ntasks-per-node=1 --cpus-per-task={{step_cpus_per_task}})
    step+=({{container}})
    # USR1 is meant for the ranks, which poll for it; it would end torchrun
    "${step[@]}" bash -c '
        trap "" USR1
        exec torchrun --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" --nproc-per-node="$1" \
            --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "${@:2}"' \
        node "$tasks_per_node" {{script}} "${arguments[@]}"
}
