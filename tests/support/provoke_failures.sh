#!/usr/bin/env bash
# Provoke known failures for real, and keep what the programs print in tests/data/failures/ID.txt.
#
#   tests/support/provoke_failures.sh ID…        the functions below, by name; without one, all of them (8 minutes)
#
# shellcheck disable=SC2016  # programs of other shells stand in single quotes
# Needs `python -m tests.support.installs mpis`. The functions below "hosts" run on a host, as root:
#   python -m tests.support.cluster --slurm 3 -- $PWD/tests/support/provoke_failures.sh ID…
cd "$(dirname "$0")/../.." || exit
ROOT=$PWD
OUT=${FAILURES_OUT:-tests/data/failures}
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
export PATH=$ROOT/.venv/bin:$PATH OMP_NUM_THREADS=1 PYTHONPATH=$ROOT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
IMPORTS='import datetime, os, sys, time, torch, torch.distributed as dist; s = datetime.timedelta'
INIT="$IMPORTS; dist.init_process_group('gloo'); rank = dist.get_rank()"

# torchrun with two ranks of the script on stdin
two() {
  cat > "$SCRATCH/train.py"
  (cd "$SCRATCH" && torchrun --standalone --nproc-per-node 2 train.py)
}
# one python, with the text of its script
one() { (cd "$SCRATCH" && printf '%s\n' "$IMPORTS" "$@" > train.py && python train.py); }
# the same without any network but a loopback
alone() { unshare --net --uts bash -c 'ip link set lo up; hostname node0; "$@"' - "$@"; }
openmpi5() { mpirun --bind-to none "$@"; }
openmpi4() { "$ROOT/.mpi/openmpi4/bin/mpirun" --oversubscribe --bind-to none "$@"; }
mpich() { "$ROOT/.mpi/mpich/bin/mpirun" "$@"; }
intel() { PATH=$ROOT/.mpi/intelmpi/bin:$PATH "$ROOT/.mpi/intelmpi/bin/mpirun" "$@"; }

# ---- torch
torch-address-in-use() { RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29871 one "
import socket; taken = socket.create_server(('', 29871), family=socket.AF_INET6, dualstack_ipv6=True)
dist.init_process_group('gloo')"; }
torch-address-in-use.python() { one "
import socket; taken = socket.create_server(('127.0.0.1', 29871)); socket.create_server(('127.0.0.1', 29871))"; }
torch-store-unreachable() { alone python -c "$IMPORTS
dist.TCPStore('127.0.0.1', 29500, 2, False, timeout=s(seconds=2))"; }
torch-rank-missing() { one "dist.TCPStore('127.0.0.1', 0, 2, True, timeout=s(seconds=2))"; }
torch-rank-missing.key() { one "
store = dist.TCPStore('127.0.0.1', 0, 1, True)
store.wait(['default_pg/0//cpu//0/rank_1'], s(seconds=1))"; }
torch-master-unresolved() { alone python -c "$IMPORTS
dist.TCPStore('gpu01.cluster', 29500, 2, False, timeout=s(seconds=2))"; }
torch-variable-missing() { one "dist.init_process_group('gloo')"; }
# the torchvision of the default index, beside a torch for CPUs of another one
torch-vision-build() { python -m pip install -q --no-deps --target "$SCRATCH/other" torchvision &> /dev/null
  PYTHONPATH="$SCRATCH/other:$ROOT" one "import torchvision"; }
torch-no-group() { one "print(dist.get_rank())"; }
torch-store-unreachable.torchrun() { alone bash -c 'echo pass > /dev/null; torchrun --nnodes 2 --rdzv-backend c10d \
  --rdzv-endpoint 127.0.0.2:29501 --rdzv-conf is_host=0,timeout=3 -m this'; }
torch-signal() { (cd "$SCRATCH" && echo 'import time; time.sleep(30)' > train.py && timeout -s HUP 8 torchrun --standalone train.py); }
torch-local-rank-argument() { cat > "$SCRATCH/train.py" <<< "
import argparse
parser = argparse.ArgumentParser(); parser.add_argument('--lr'); parser.parse_args()"
  (cd "$SCRATCH" && python train.py --local-rank=0); }
torch-unused-parameters() { two <<< "$INIT
model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
model.forward = lambda x: model[0](x)
ddp = torch.nn.parallel.DistributedDataParallel(model)
for _ in range(2): ddp(torch.ones(2)).sum().backward()"; }
torch-models-differ() { two <<< "$INIT
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2, bias=rank == 0))"; }
torch-state-dict-keys() { one "
model = torch.nn.Linear(2, 2)
model.load_state_dict({f'module.{key}': value for key, value in model.state_dict().items()})"; }
torch-weights-only() { one "
class Config: pass
torch.save({'config': Config()}, 'model.pt'); torch.load('model.pt')"; }
torch-checkpoint-damaged() { one "
torch.save(torch.ones(1000), 'model.pt'); os.truncate('model.pt', 900); torch.load('model.pt')"; }
torch-checkpoint-of-gpu() { one "
import torch.serialization as format
tag = format.location_tag; format.location_tag = lambda storage: 'cuda:0'
torch.save(torch.ones(2), 'model.pt'); format.location_tag = tag
torch.load('model.pt')"; }
torch-worker-killed() { one "
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): os.kill(os.getpid(), 9)
list(torch.utils.data.DataLoader(Data(), num_workers=1))"; }
system-shared-memory() { unshare --mount bash -c 'mount -t tmpfs -o size=1m none /dev/shm; "$@"' - python -c "$IMPORTS
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.ones(1000, 1000)
if __name__ == '__main__': list(torch.utils.data.DataLoader(Data(), num_workers=1))"; }
system-open-files.torch() { (ulimit -n 24; one "
class Data(torch.utils.data.Dataset):
    def __len__(self): return 800
    def __getitem__(self, i): return torch.ones(10)
kept = list(torch.utils.data.DataLoader(Data(), num_workers=1))"); }
torch-without-cuda.nccl() { RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0 one "dist.init_process_group('nccl')"; }
torch-without-cuda() { one "torch.ones(1).to('cuda')"; }
gloo-timeout.barrier() { two <<< "$INIT
if rank == 0: dist.monitored_barrier(timeout=s(seconds=2))
else: time.sleep(4)"; }
torch-collectives-differ() { TORCH_DISTRIBUTED_DEBUG=DETAIL two <<< "$INIT
if rank == 0: dist.all_reduce(torch.ones(2))
else: dist.barrier()"; }

# ---- gloo
torch-collectives-differ.gloo() { two <<< "$INIT; dist.broadcast(torch.ones(2 + 900 * rank), 1)"; }
gloo-timeout() { two <<< "$IMPORTS
dist.init_process_group('gloo', timeout=s(seconds=2))
dist.all_reduce(torch.ones(2)) if dist.get_rank() == 0 else time.sleep(4)"; }
gloo-peer-gone() { two <<< "$INIT
dist.barrier()
if rank == 1: os._exit(0)
time.sleep(1); dist.all_reduce(torch.ones(2))"; }
gloo-interface() { RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0 GLOO_SOCKET_IFNAME=ib7 one "dist.init_process_group('gloo')"; }
gloo-not-connected.own-name() { RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0 alone bash -c 'hostname gpu01; python -c "$1"' - "$INIT"; }

# ---- Open MPI
openmpi-slots() { PRTE_MCA_rmaps_default_mapping_policy='' mpirun -n 80 hostname; "$ROOT/.mpi/openmpi4/bin/mpirun" -n 80 hostname; }
openmpi-root() { env -u OMPI_ALLOW_RUN_AS_ROOT -u OMPI_ALLOW_RUN_AS_ROOT_CONFIRM "$ROOT/.venv/bin/mpirun" -n 1 true
  env -u OMPI_ALLOW_RUN_AS_ROOT -u OMPI_ALLOW_RUN_AS_ROOT_CONFIRM "$ROOT/.mpi/openmpi4/bin/mpirun" -n 1 true; }
mpi-program-missing.openmpi() { openmpi5 -n 1 pyhton train.py; openmpi4 -n 1 pyhton train.py; }
system-killed.openmpi() { openmpi5 -n 1 bash -c 'kill -9 $$'; openmpi4 -n 1 bash -c 'kill -9 $$'; }
system-crashed.openmpi() { openmpi5 -n 1 bash -c 'kill -11 $$'; openmpi4 -n 1 bash -c 'kill -11 $$'; }
system-crashed.openmpi-bus-error() { openmpi5 -n 1 bash -c 'kill -7 $$'; openmpi4 -n 1 bash -c 'kill -7 $$'; }
openmpi-no-path() { openmpi5 --mca pml ob1 --mca btl self -n 2 python -c 'from mpi4py import MPI; MPI.COMM_WORLD.barrier()'; }
openmpi-no-path.interface() { openmpi5 --mca pml ob1 --mca btl self,tcp --mca btl_tcp_if_include ib7 -n 2 python -c 'from mpi4py import MPI; MPI.COMM_WORLD.barrier()'; }
openmpi-hostfile() { printf 'node1 slots=two\n' > "$SCRATCH/hosts"; openmpi5 --hostfile "$SCRATCH/hosts" hostname; openmpi4 --hostfile "$SCRATCH/hosts" hostname; }
openmpi-option() { openmpi5 -bind-to none -n 1 true; openmpi5 --no-such-option -n 1 true; openmpi4 --no-such-option -n 1 true; }
openmpi-cores() { PRTE_MCA_rmaps_default_mapping_policy='' mpirun --map-by :oversubscribe --bind-to core -n 8 true;  mpirun --map-by slot:pe=8 -n 2 true; "$ROOT/.mpi/openmpi4/bin/mpirun" --map-by slot:pe=8 -n 2 true; }
openmpi-session-folder() { openmpi5 --mca prte_tmpdir_base /proc -n 1 true;  openmpi4 --mca orte_tmpdir_base /proc -n 1 true; }
openmpi-session-folder.full() { unshare --mount bash -c 'mount -t tmpfs -o size=64k tmpfs /mnt && head -c 1M /dev/zero >/mnt/full; TMPDIR=/mnt mpirun -n 1 true'; }
openmpi-after-finalize() { openmpi5 -n 1 python -c 'from mpi4py import MPI; MPI.Finalize(); MPI.COMM_WORLD.Get_size()'; }
openmpi-ssh-missing() { openmpi4 --mca plm_rsh_agent /no/ssh -H node9 hostname; openmpi5 --prtemca plm_ssh_agent /no/ssh -H node9 hostname; }
ssh-refused.openmpi() { alone bash -c '"$1"/.mpi/openmpi4/bin/mpirun -H 127.0.0.9 hostname; mpirun -H 127.0.0.9 hostname' - "$ROOT"; }
openmpi-component() { openmpi5 --mca pml nonsense -n 1 python -c 'from mpi4py import MPI'; openmpi4 --mca btl nonsense -n 1 python -c 'from mpi4py import MPI'; }

# ---- MPICH and Intel MPI
system-killed.mpich() { mpich -n 2 bash -c 'kill -9 $$'; }
mpi-program-missing.mpich() { mpich -n 1 pyhton train.py; }
mpi-init-failed.mpich() { MPI4PY_LIBMPI=$ROOT/.mpi/mpich/lib/libmpi.so.12 UCX_TLS=nonsense mpich -n 2 python -c 'from mpi4py import MPI; MPI.COMM_WORLD.barrier()'; }
ssh-refused.mpich() { alone "$ROOT/.mpi/mpich/bin/mpirun" -hosts 127.0.0.9 hostname; }
system-killed.intelmpi() { intel -n 2 bash -c 'kill -9 $$'; }
mpi-program-missing.intelmpi() { intel -n 1 pyhton train.py; }
mpi-host-not-started.intelmpi() { PATH=$ROOT/.mpi/intelmpi/bin:$PATH alone "$ROOT/.mpi/intelmpi/bin/mpirun" -hosts 127.0.0.9 hostname; }
python-library-missing.mpi() { MPI4PY_LIBMPI=/no/libmpi.so.12 python -c 'from mpi4py import MPI'; }
mpi-rank-variable() { one 'import os; rank = int(os.environ["OMPI_COMM_WORLD_RANK"])'; }
slurm-rank-variable() { one 'import os; rank = int(os.environ["SLURM_PROCID"])'; }
mpi-other-library() { MPI4PY_LIBMPI=$ROOT/.mpi/mpich/lib/libmpi.so.12 openmpi5 -n 2 python -c 'from mpi4py import MPI; print(MPI.COMM_WORLD.size)'; mpich -n 2 python -c 'from mpi4py import MPI; print(MPI.COMM_WORLD.size)'; }

# ---- Python and the system
python-module-missing() { one "import flash_attn"; }
python-relative-import() { launched "from . import models"; }
python-library-missing() { one "import ctypes; ctypes.CDLL('libcudart.so.12')"; }
python-file-missing.script() { (cd "$SCRATCH" && python trian.py); }
python-file-missing() { one "open('data/train.bin')"; }
# a script of two ranks of mpiddp launch, with arguments
launched() { printf '%s\n' "$1" > "$SCRATCH/train.py"; (cd "$SCRATCH" && python -m mpiddp launch -n 2 --hang-timeout 8 train.py "${@:2}"); }
python-usage() { launched "import argparse; argparse.ArgumentParser().parse_args()" --foo; }
python-interrupted() { launched "import os; os.environ['RANK'] == '1' and os.kill(os.getpid(), 2); time.sleep(9)"; }
python-hang() { launched "$INIT; dist.barrier(); rank == 1 and time.sleep(99); dist.barrier()"; }
python-left-early() { launched "$INIT; dist.barrier(); rank or dist.all_reduce(torch.ones(2))"; }
python-quiet() { launched "import time; time.sleep(99)"; }
python-start-method() { one "
import multiprocessing
multiprocessing.get_context('spawn').Process(target=print).start()"; }
python-start-method.pool() { one "
from concurrent.futures import ProcessPoolExecutor
list(ProcessPoolExecutor(2, torch.multiprocessing.get_context('spawn')).map(print, range(4)))"; }
python-start-method.joins() { launched "$INIT
list(torch.utils.data.DataLoader([1, 2], num_workers=1, multiprocessing_context='forkserver'))"; }
python-child-ended() { one "
class Data(torch.utils.data.IterableDataset):
    __iter__ = lambda self: os._exit(3)
list(torch.utils.data.DataLoader(Data(), num_workers=1))"; }
python-child-ended.pool() { one "
from concurrent.futures import ProcessPoolExecutor
list(ProcessPoolExecutor(1).map(os._exit, [3]))"; }
python-child-ended.spawn() { one "
if __name__ == '__main__': torch.multiprocessing.spawn(os._exit, nprocs=2)"; }
system-disk-full() { one "open('/dev/full', 'wb').write(bytes(1 << 20))"; }
system-disk-full.torch() { one "torch.save(torch.ones(1 << 20), '/dev/full')"; }
system-disk-failed.read-only() { unshare --mount bash -c 'mount -t tmpfs -o ro none /mnt; "$@"' - python -c "open('/mnt/model.pt', 'w')"; }
system-permission() { one "os.setuid(65534); open('/root/model.pt', 'w')"; }
system-open-files() { (ulimit -n 20; one "kept = [open('/dev/null') for _ in range(99)]"); }
system-processes() { (cd / ; setpriv --reuid 60999 --clear-groups bash -c 'ulimit -u 2; python3 -c "
import threading, time
for _ in range(9): threading.Thread(target=time.sleep, args=(1,)).start()"; ulimit -u 1; (true) | true'); }
system-crashed() { bash -c 'python3 -c "import os; os.kill(os.getpid(), 11)"; true'; }
system-crashed.illegal-instruction() { bash -c 'python3 -c "import os; os.kill(os.getpid(), 4)"; true'; }
system-out-of-memory() {  # the kernel's own words, of a process in a group with 64 MB
  group=/sys/fs/cgroup/memory/provoked-failure
  mkdir "$group" && echo 64M > "$group/memory.limit_in_bytes"
  before=$(dmesg | wc -l); bash -c "echo \$\$ > $group/cgroup.procs; exec python3 -c 'bytearray(1 << 28)'"; dmesg | tail -n +$((before + 1)) | grep -i "oom\|memory cgroup out"
  sleep 0.2; rmdir "$group"; }
python-binaries-differ() { one "import ctypes; ctypes.CDLL(torch.__path__[0] + '/lib/libtorch_python.so', mode=0).no_such_function"; }
system-killed() { bash -c 'python3 -c "import os; os.kill(os.getpid(), 9)"; true'; }
system-command-missing() { bash -c 'torhcrun train.py'; bash -c 'pyhton train.py'; }
system-line-endings() { printf '#!/bin/bash\r\ntrue\r\n' > "$SCRATCH/run.sh"; chmod +x "$SCRATCH/run.sh"; bash -c "$SCRATCH/run.sh"; }

# ---- hosts: ssh, MPI over ssh, gloo between hosts, Slurm
on() {  # as in a new login
  local command=(env -i HOME="$HOME" TMPDIR=/run/tmp PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin bash -c "$2")
  [[ $1 == node0 ]] || command=(ssh "$1" "${command[@]@Q}")
  (cd && "${command[@]}")
}
ssh-key-refused() { on node0 'ssh -o BatchMode=yes nobody@node1 true'; }
ssh-host-key-unknown() { on node0 'ssh -o BatchMode=yes -o UserKnownHostsFile=/dev/null -o GlobalKnownHostsFile=/dev/null node1 true'; }
ssh-host-key-changed() { on node0 'key=$(cut -d" " -f2- ~/.ssh/known_hosts | head -n 1); ssh-keygen -q -t ed25519 -N "" -f /run/tmp/other
  echo "node1 $(cut -d" " -f1,2 /run/tmp/other.pub)" > /run/tmp/known; ssh -o BatchMode=yes -o UserKnownHostsFile=/run/tmp/known node1 true; rm /run/tmp/other*'; }
ssh-refused() { on node0 'ssh -o BatchMode=yes -p 2222 node1 true'; }
ssh-timed-out() { on node0 'ssh -o ConnectTimeout=2 -o BatchMode=yes 10.77.0.99 true'; }
ssh-unreachable() { on node0 'ip route add unreachable 10.99.0.9; ssh -o BatchMode=yes 10.99.0.9 true; ip route del unreachable 10.99.0.9; ssh -o BatchMode=yes 10.99.0.8 true'; }
ssh-unresolved() { on node0 'ssh -o BatchMode=yes gpu-17 true'; }
ssh-permissions() { on node0 'cp ~/.ssh/id_ed25519 /run/tmp/key; chmod 644 /run/tmp/key; ssh -o BatchMode=yes -i /run/tmp/key -o IdentitiesOnly=yes node1 true; rm /run/tmp/key'; }
ssh-permissions.config() { on node0 'cp ~/.ssh/config /run/tmp/config 2> /dev/null; touch ~/.ssh/config; chmod 666 ~/.ssh/config; ssh -o BatchMode=yes node1 true; chmod 600 ~/.ssh/config'; }
ssh-closed-early() { on node1 'python3 -c "
import socket; s = socket.create_server((\"0.0.0.0\", 2022)); s.accept()[0].close()" & sleep 1; wait' &
  sleep 2; on node0 'ssh -o BatchMode=yes -p 2022 node1 true'; wait; }
ssh-no-shell() { on node1 'sed -i.bak "s:^nobody.*:nobody\:x\:0\:0\:nobody\:/root\:/usr/sbin/nologin:" /etc/passwd'; on node0 'ssh -o BatchMode=yes nobody@node1 true'; on node1 'cat /etc/passwd.bak > /etc/passwd'; }
ssh-other-shell() { on node1 'sed -i.bak "/^root/s:/bin/bash:/bin/tcsh:" /etc/passwd'
  on node0 "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 $ROOT/.venv/bin/mpirun -H node1 hostname"; ssh node1 'cat /etc/passwd.bak > /etc/passwd'; }
openmpi-daemon-missing() { on node0 "export PATH=$ROOT/.mpi/openmpi4/bin:\$PATH OPAL_PREFIX=$ROOT/.mpi/openmpi4 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  mpirun -H node1,node2 hostname; export PATH=$ROOT/.venv/bin:\$PATH; unset OPAL_PREFIX; mpirun -H node1,node2 hostname"; }
openmpi-host-lost() {  # the daemon is killed in its host's own pid namespace
  for mpi in .mpi/openmpi4/bin .venv/bin; do
    (sleep 6; on node1 'kill -9 $(pgrep -x "orted|prted")') &
    on node0 "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout 30 $ROOT/$mpi/mpirun -H node0,node1 sleep 20"
    wait
  done; }
mpi-host-not-started.unresolved() { on node0 "export PATH=$ROOT/.mpi/intelmpi/bin:\$PATH; mpirun -hosts node0,gpu-17 hostname"; }
gloo-not-connected.loopback() { cat > "$SCRATCH/train.py" <<< "$IMPORTS; dist.init_process_group('gloo', timeout=s(seconds=8)); dist.barrier()"
  for rank in 0 1; do
    on node$rank "GLOO_SOCKET_IFNAME=lo MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 WORLD_SIZE=2 RANK=$rank timeout 50 $ROOT/.venv/bin/python $SCRATCH/train.py" &
  done; wait; }
gloo-no-route() {  # rank 0 is at an address to which node1 has no route
  on node0 'ip address add 10.66.0.1/24 dev eth0 label eth0:other'
  for rank in 0 1; do
    on node$rank "GLOO_SOCKET_IFNAME=$([[ $rank == 0 ]] && echo eth0:other || echo eth0) MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 WORLD_SIZE=2 RANK=$rank \
      timeout 20 $ROOT/.venv/bin/python -c $(printf %q "$INIT")" &
  done; wait; }
system-command-missing.slurm() { on node0 'srun -N 1 torhcrun train.py'; }
system-killed.slurm() { on node0 'srun -N 1 bash -c "kill -9 \$\$"'; }
slurm-ended-job() { on node0 'srun -N 1 -t 1 sleep 100'; }
slurm-no-such-nodes() { on node0 'srun -N 9 -t 1 true; srun -N 1 --gres=gpu:8 true; srun -c 999 true'; }
slurm-no-such-nodes.partition() { on node0 'srun -p gpu true'; }
slurm-step-too-large() { on node0 'salloc -n 1 srun -n 9 --immediate=3 true'; }
slurm-mpi-type() { on node0 'srun --mpi=pmix_v9 true'; }

provoke() {
  { "$1" 2>&1; } | sed -e "s:$SCRATCH:/home/user:g; s:$ROOT/.venv:/opt/venv:g; s:$ROOT/.mpi:/opt:g; s:$ROOT:/home/user:g" \
    -e "s:$(python -c 'import sys; print(sys.base_prefix)'):/usr:g; s/\(^\|[^-_a-z]\)$(hostname)\b/\1node0/g" | tail -n 60 > "$OUT/$1.txt"
}
mkdir -p "$OUT"
for id in "${@:-$(declare -F | sed -n 's/^declare -f \(.*-.*\)/\1/p')}"; do
  for each in $id; do provoke "$each"; done
done
