#!/bin/sh
# A Slurm of one node on this machine, for trying jobs and for the tests marked long. As root, on Debian or Ubuntu:
#
#   scripts/local_slurm.sh install           Debian's packages, slurm-wlm and munge
#   eval "$(scripts/local_slurm.sh start)"   starts munged, slurmctld and slurmd, and exports SLURM_CONF
#   scripts/local_slurm.sh stop
#
# Everything lies in one folder ($VITRUVIUS_SLURM, by default /var/tmp/vitruvius-slurm) and listens on 127.0.0.1;
# a Slurm that this machine belongs to is not touched.
set -eu
folder=${VITRUVIUS_SLURM:-/var/tmp/vitruvius-slurm}
PATH=$PATH:/usr/sbin:/sbin

start() {
    mkdir -p "$folder/state" "$folder/spool"
    chmod 755 "$folder"
    [ -s "$folder/munge.key" ] || dd if=/dev/urandom of="$folder/munge.key" bs=1024 count=1 2>/dev/null
    chmod 400 "$folder/munge.key"
    host=$(hostname -s)
    cat >"$folder/slurm.conf" <<CONF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort=26817
SlurmdPort=26818
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=1000,bf_interval=1
ReturnToService=2
KillWait=10
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 RealMemory=8000 State=UNKNOWN
PartitionName=local Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
    export SLURM_CONF="$folder/slurm.conf"
    munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
        --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munge.seed" >&2
    slurmctld -c >&2
    slurmd >&2
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        case $(sinfo -h -o %T 2>/dev/null) in idle*) break ;; *) sleep 1 ;; esac
    done
    sinfo >&2
    echo "export SLURM_CONF=$folder/slurm.conf"
}

stop() {
    for name in slurmd slurmctld munged; do
        [ -f "$folder/$name.pid" ] && kill "$(cat "$folder/$name.pid")" || true
    done
}

case ${1:-} in
    install) apt-get install -y --no-install-recommends slurm-wlm munge ;;
    start) start ;;
    stop) stop ;;
    *) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 1 ;;
esac
