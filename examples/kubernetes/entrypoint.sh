#!/bin/bash
# The entry point of every pod of an MPIJob: set up ssh with the job's key, then run the command.
#
#   entrypoint.sh worker            an sshd, for the ranks of this pod
#   entrypoint.sh mpiddp launch …   the launcher
#
# The MPI operator gives all pods of a job one key pair. It is the login key of the launcher and the host key
# of the workers: so ssh verifies every host, and only this job's pods can log in.
set -euo pipefail

keys=${SSH_KEYS:-/etc/mpiddp/ssh} # sshAuthMountPath of the manifest
[[ -r $keys/id_rsa && -r $keys/id_rsa.pub ]] || {
  echo "entrypoint.sh: no key pair in $keys. Set sshAuthMountPath: $keys in the MPIJob." >&2
  exit 2
}

# ssh wants a folder and files that only their owner can write; those of a mounted secret are not.
install -d -m 700 ~/.ssh /run/sshd
install -m 600 "$keys/id_rsa" "$keys/id_rsa.pub" ~/.ssh/ # an ECDSA key, whatever its name says
install -m 600 "$keys/id_rsa.pub" ~/.ssh/authorized_keys
read -r kind key _ <"$keys/id_rsa.pub"
echo "* $kind $key" >~/.ssh/known_hosts

if [[ ${1-} == worker ]]; then
  exec /usr/sbin/sshd -D -e -h ~/.ssh/id_rsa -o PasswordAuthentication=no
fi
exec "$@"
