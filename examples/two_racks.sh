#!/usr/bin/env bash
# Two racks, one torchrun each, told about each other by MEND_* alone: what `mend launch` does for
# you, and what you do yourself when the racks are on machines of their own.
#
#   examples/two_racks.sh [SCRIPT [ARGS...]]
#       both racks on this machine; without a script examples/ddp.py
#
#   examples/two_racks.sh --rack 0 HOST0 HOST1 [SCRIPT [ARGS...]]     on the first machine
#   examples/two_racks.sh --rack 1 HOST0 HOST1 [SCRIPT [ARGS...]]     on the second one
#       HOSTs as the other machine reaches them; the same two on both
#
#       MEND_KEY_FILE on both: the same key, from `mend keys new FILE`, copied by a way you trust
#
# In the environment: NPROC processes per rack (2), PORT the first of the ports (21900), JOB_ID.
# Ctrl-C ends every rack that this script has started. The exit status is that of the first rack
# that failed. A rack that dies does not end the other: rack 0 coordinates here and trains on
# without rack 1; rack 1 trains on without rack 0, and merges again once that is started again.
set -euo pipefail

nproc=${NPROC:-2} port=${PORT:-21900}
racks=(0 1) hosts=(127.0.0.1 127.0.0.1)
ports=("$port" "$((port + 1))") # on one machine, each rack needs a port of its own
if [[ ${1:-} == --rack ]]; then
  [[ $# -ge 4 && $2 =~ ^[01]$ ]] || { echo "usage: $0 --rack 0|1 HOST0 HOST1 [SCRIPT ...]" >&2; exit 2; }
  racks=("$2") hosts=("$3" "$4") ports=("$port" "$port")
  shift 4
fi
[[ $# -gt 0 ]] || set -- "$(dirname "$0")/ddp.py"

# The same on all ranks of all racks.
export MEND_RACKS=2
export MEND_JOB_ID=${JOB_ID:-two-racks}
export MEND_SIDEBAND_PEERS="0=tcp://${hosts[0]}:${ports[0]},1=tcp://${hosts[1]}:${ports[1]}"
# Every rank serves its payloads on one of these; 2 x NPROC on one machine, so keep it wide.
export MEND_DATA_PORTS="$((port + 100))-$((port + 199))"
# Two racks on one machine share its cores; more threads than cores only make each other wait.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

pids=()

# shellcheck disable=SC2329 # the traps call it
stop() {
  trap '' INT TERM
  kill -TERM "${pids[@]}" 2>/dev/null || true # torchrun passes it on to its ranks
  wait || true
  exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM

# Each torchrun gets a process group of its own: Ctrl-C then reaches this script alone, which passes
# on one signal instead of two, and the shell does not make background jobs deaf to it.
set -m

for rack in "${racks[@]}"; do
  # Where this rack's leader listens, and how others reach what this rack serves. On one machine
  # that is loopback; else all interfaces, which is why the address has to be said as well.
  export MEND_RACK=$rack
  if [[ ${#racks[@]} -eq 2 ]]; then
    export MEND_SIDEBAND_ADDR="tcp://127.0.0.1:${ports[rack]}"
  else
    export MEND_SIDEBAND_ADDR="tcp://0.0.0.0:${ports[rack]}" MEND_ADVERTISE_HOST="${hosts[rack]}"
  fi
  # --standalone: a rendezvous of its own on a free port; racks share nothing inside torch.
  torchrun --standalone --nproc-per-node "$nproc" "$@" </dev/null &
  pids+=("$!")
done

status=0
for pid in "${pids[@]}"; do
  code=0
  wait "$pid" || code=$?
  [[ $status -ne 0 ]] || status=$code
done
exit "$status"
