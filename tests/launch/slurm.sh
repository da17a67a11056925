#!/bin/bash
#SBATCH --job-name=jgraph
#SBATCH --ntasks=3
#SBATCH --time=1:00

# Starts the tasks of ps (1) and worker (2), one process each, and then the
# program, which connects with
#   jg.connect(os.environ["JGRAPH_TARGET"], tls=os.environ["JGRAPH_TLS"])
# The directory that this is submitted from has to be on a disk that all nodes share.
set -euo pipefail
umask 077
# A job that was put back into the queue has its number again.
run="$SLURM_SUBMIT_DIR/jgraph-$SLURM_JOB_ID${SLURM_RESTART_COUNT:+-$SLURM_RESTART_COUNT}"
mkdir "$run"

# Hosts in the order of SLURM_PROCID, which is the order of the tasks.
mapfile -t hosts < <(srun --label hostname | sort -n | sed 's/^ *[0-9]*: *//')
addresses() {
  for ((i = $1; i < $2; i++)); do
    printf '"%s:%d", ' "${hosts[i]}" $((8470 + i))
  done
}
{
  echo "[cluster]"
  echo "ps = [$(addresses 0 1)]"
  echo "worker = [$(addresses 1 3)]"
  echo "[tls]"
  echo 'dir = "certs"'
} > "$run/cluster.toml"
jgraph certs "$run/certs" --cluster "$run/cluster.toml" > "$run/certs.txt"

srun --kill-on-bad-exit=0 --output="$run/server-%t.log" \
  jgraph server --cluster "$run/cluster.toml" --bind 0.0.0.0 &
servers=$!
trap 'kill "$servers" && wait "$servers" || true' EXIT

export JGRAPH_TLS="$run/certs"
export JGRAPH_TARGET="jgraphs://${hosts[0]}:8470"
echo "$JGRAPH_TARGET" > "$run/target"
for ((attempt = 0; attempt < 60; attempt++)); do
  jgraph status "$JGRAPH_TARGET" --tls-dir "$JGRAPH_TLS" &> "$run/status.txt" && break
  kill -0 "$servers" || { cat "$run"/server-*.log >&2; exit 1; }
  sleep 2
done
cat "$run/status.txt"
python train.py --name 'a b'
