#!/bin/bash
# Train on several nodes under Slurm: one torchrun per node, one process per GPU.
#
#     sbatch examples/slurm.sh imagenet21k_mixer_l16 --out /shared/runs/c --set data.path=/shared/shards21k --set sharding=fsdp
#
# --out is a folder that all nodes can access. A process that fails is restarted by torchrun; if a node is lost or the time
# is over, Slurm puts the job back into its queue. Either way the run continues from its last checkpoint.
#SBATCH --job-name=allmlp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

trap 'scontrol requeue "$SLURM_JOB_ID"' USR1  # two minutes before the time is over

read -r first_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "$SLURM_GPUS_ON_NODE" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first_node:29500" \
    --rdzv-id "$SLURM_JOB_ID" \
    --max-restarts 3 \
    -m allmlp train "$@" &
wait $!
