# ssh for mpirun, which calls this with options of ssh, a host, and words for a shell there. They travel as
# octal numbers, so that a login shell of any kind, such as fish or csh, passes them on to sh as they are.

while getopts 46AaCfGgKkMNnqsTtVvXxYyB:b:c:D:E:e:F:I:i:J:L:l:m:O:o:P:p:Q:R:S:W:w: option; do :; done
arguments=$OPTIND words=  # of ssh: its options and the host
for word; do
  shift
  if [ "$arguments" -gt 0 ]; then set -- "$@" "$word"; else words="$words $word"; fi
  arguments=$((arguments - 1))
done

# Open MPI asks for the shell first, because it has words for csh too.
[ "$words" != ' echo $SHELL' ] || exec echo /bin/bash

# A start-up file of the login shell may read stdin: it gets empty lines. If one has started another shell, as
# with `exec zsh -l`, that shell reads the line. What they print goes to stderr, because stdout is of the ranks.
octal=$(printf %s "$words" | od -An -v -to1 | tr -d '\n' | sed 's/ /\\0/g')
line="exec sh -c 'eval \"\$(printf %b \"\$0\")\"' '$octal'"
exec ssh -x "$@" "$line" >&2 <<LINES








$line
LINES
