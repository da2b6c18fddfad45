#!/usr/bin/env bash
# Train under SLURM, with a task per GPU; run from the root of the checkout:
#
#     sbatch --nodes=8 mpi_scripts/jobs/slurm.sh --preset resnet50-imagenet --data DIR \
#         --workers 8 --amp bf16 --checkpoint FOLDER
#
# A requeued job resumes from its last checkpoint. Options of sbatch override those here.
#
#SBATCH --job-name=gtopk
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=gtopk-%j.log
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch, from the root of the checkout}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    python mpi_scripts/train.py "$@"
