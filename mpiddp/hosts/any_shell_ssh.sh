# ssh for mpirun, which calls this with options of ssh, a host, and words for a shell there. The words travel as
# octal numbers, so that a login shell of any kind, such as fish or csh, passes them on to sh unchanged.
# shellcheck shell=sh disable=SC2016,SC2034,SC2087

while getopts 46AaCfGgKkMNnqsTtVvXxYyB:b:c:D:E:e:F:I:i:J:L:l:m:O:o:P:p:Q:R:S:W:w: option; do :; done
arguments=$OPTIND words=  # ssh has so many arguments: its options and the host
for word; do
  shift
  if [ "$arguments" -gt 0 ]; then set -- "$@" "$word"; else words="$words $word"; fi
  arguments=$((arguments - 1))
done

# Open MPI asks for the login shell first, because it would write its words for csh.
[ "$words" != ' echo $SHELL' ] || exec echo /bin/bash

# A start-up file of the login shell that reads stdin gets empty lines. If it has started another shell, as with
# `exec zsh -l`, that shell reads the line. Their output goes to stderr, because stdout belongs to the ranks. If
# a signal kills the daemon, the exit code is ssh's 255: mpirun would take 128 + N for the signal of a rank.
octal=$(printf %s "$words" | od -An -v -to1 | tr -d '\n' | sed 's/ /\\0/g')
[ "$octal" ] || exit 255  # this user gets no more processes
line="exec sh -c 'eval \"\$(printf %b \"\$0\")\"; code=\$?; [ \$code -le 128 ] || code=255; exit \$code' '$octal'"
exec ssh -x "$@" "$line" >&2 <<LINES








$line
LINES
