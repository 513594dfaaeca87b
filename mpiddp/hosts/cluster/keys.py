"""`mpiddp hosts keys`: from here, ssh reaches every host without a password.

    mpiddp hosts keys hostfiles/two_nodes
    mpiddp hosts keys hostfiles/two_nodes --jump me@login.example.org

A host that ssh reaches already is left as it is. A person confirms the fingerprint of every host that is not
known yet. Passwords are ssh's own matter: it asks for them at the terminal.
"""

from __future__ import annotations

import argparse
import os
import pwd
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType

from mpiddp.arguments import OneSentenceParser
from mpiddp.errors import DONE, UserError
from mpiddp.hosts.hostfile import Host, Hosts, granted_hosts
from mpiddp.hosts.names import is_this_host, resolve_all
from mpiddp.hosts.slurm import compress_names
from mpiddp.hosts.ssh import shell_command
from mpiddp.hosts.ssh_complaints import ssh_complaint
from mpiddp.hosts.transport import SSH
from mpiddp.text import escaped, names_by_value

# sshd refuses some of more than ten logins that arrive at once (MaxStartups), and all pass the jump host.
_AT_ONCE, _AT_ONCE_BY_JUMP = 32, 8
_ANSWER_S, _SCAN_S = 60.0, 5
_LOGIN_S, _LOGINS_S = 6.0, 600.0  # more for a login from a host to another, and to all others
# Of a host's keys the first one is taken: that of the file to which a person is sent.
_PREFERRED = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ssh-rsa")
_REACHES, _MISSES = "mpiddp-reaches", "mpiddp-misses"

# The commands of the shell on a host. They hold no input: it comes through stdin. sshd ignores a file of
# keys that others may write.
_ADD_KEY = (
    'IFS=" " read -r kind key comment; umask 077; file=.ssh/authorized_keys; '
    "mkdir -p .ssh && touch $file && chmod go-w .ssh $file || exit 1; "
    'grep -qF -- "$key" $file && exit 0; '
    '[ -z "$(tail -c 1 $file)" ] || echo >> $file; '
    'echo "$kind $key $comment" >> $file'
)
_REACH = (
    "while read -r name target port; do "
    'ssh -n -T -o BatchMode=yes -o ConnectTimeout=5 ${port:+-p "$port"} -- "$target" true >/dev/null 2>&1 && '
    f'echo "{_REACHES} $name" || echo "{_MISSES} $name"; '
    "done; exit 0"
)

Done = subprocess.CompletedProcess[str]


def add_arguments(parser: OneSentenceParser) -> None:
    parser.add_argument("file", help="the hostfile")
    parser.add_argument(
        "--jump", metavar="HOST", help="log in through this host: [user@]name[:port], as ssh -J"
    )


def main(options: argparse.Namespace, hosts: Hosts) -> int:
    """Make a key, confirm the hosts, copy the key, each where it is missing. Print who reaches whom.

    Raises:
        UserError: bad input, a host that does not answer, or nobody who says yes.
    """
    SSH.check_installed()
    jump = None if options.jump is None else parse_jump(options.jump)
    resolve_all([host.name for host in hosts.hosts])
    others = [host for host in hosts.hosts if not is_this_host(host.name)]
    try:
        if jump is not None:
            open_logins([jump], None)
        open_logins(others, jump)
    except OSError as error:  # of the files in ~/.ssh
        raise UserError(f"{error.filename}: {error.strerror}.") from None
    for line in summary(*reached(hosts.hosts, jump)):
        print(line)
    if jump is not None:
        print("Every other command goes that way too where ~/.ssh/config has:")
        print(f"Host {' '.join(host.name for host in others)}\n    ProxyJump {_jump_text(jump)}")
    return DONE


def parse_jump(text: str) -> Host:
    """The host of --jump. Raises UserError as for a hostfile."""
    # An address of IPv6 has a port only after its bracket.
    with_port = re.fullmatch(r"([^\[:]*|.*\]):([^:]*)", text)
    name, port = with_port.groups() if with_port else (text, "")
    if len(name.split()) != 1 or not re.fullmatch("[0-9]{0,5}", port):
        raise UserError(
            "--jump: expected one host as [user@]name[:port]. "
            "Example: --jump me@login.example.org:2222"
        )
    return granted_hosts([[name, *([f"port={port}"] if port else [])]], "--jump").hosts[0]


def _jump_text(jump: Host) -> str:
    """The value of ssh -J, which cuts a name without brackets at its first colon."""
    name = f"[{jump.name}]" if ":" in jump.name else jump.name
    user = f"{jump.user}@" if jump.user else ""
    return f"{user}{name}:{jump.port}" if jump.port else f"{user}{name}"


def open_logins(hosts: Sequence[Host], jump: Host | None) -> None:
    """Make ssh reach all of `hosts` without a question.

    Raises:
        UserError: as `main`.
    """
    complaints = _complaints(hosts, jump)
    unknown = [host for host, text in complaints.items() if _is_unknown(text)]
    closed = [host for host, text in complaints.items() if "Permission denied" in text]
    _refuse({host: complaints[host] for host in complaints if host not in unknown + closed}, jump)
    if unknown:
        _confirm(unknown, jump)
        closed += _complaints(unknown, jump)
    if closed:
        key = _public_key(closed[0])
        for host in closed:  # one after the other: ssh may ask for a password
            _add_key(host, key, jump)
            print(f"{host.name}: the key was copied", flush=True)
        _refuse(_complaints(closed, jump), jump)


def _is_unknown(complaint: str) -> bool:
    return "Host key verification failed" in complaint and "HAS CHANGED" not in complaint


def _complaints(hosts: Sequence[Host], jump: Host | None) -> dict[Host, str]:
    """What ssh says of each host to which it cannot log in without a question."""
    answers = _on_each("exit 0", dict.fromkeys(hosts, ""), jump)
    return {host: answer.stderr for host, answer in answers.items() if answer.returncode}


def _refuse(complaints: Mapping[Host, str], jump: Host | None) -> None:
    sentences = []
    for host, text in complaints.items():
        sentence = ssh_complaint(host, text)
        if jump is not None and (why := re.search("open failed: (.*)", text)):
            sentence = f"{host.name}: {jump.name} does not reach it ({why[1].strip()})."
        elif "Permission denied" in text:
            sentence = f"{host.name}: the key opens no login. If it has a passphrase, run: ssh-add"
        sentences.append(sentence)
    if sentences:
        raise UserError("\n".join(sentences))


def _confirm(hosts: Sequence[Host], jump: Host | None) -> None:
    """Let a person compare the fingerprints of these hosts, and remember their keys after a yes."""
    width = max(len(host.name) for host in hosts)
    lines: dict[str, Path] = {}
    for host in hosts:
        settings = _settings(host)
        address, port = settings["hostname"][0], int(settings["port"][0])
        key = _scan(address, port, jump)
        print(f"{host.name:<{width}}  {_fingerprint(key)}")
        name = settings.get("hostkeyalias", [address])[0].lower()
        known_hosts = _path(settings["userknownhostsfile"][0].split()[0])
        lines[f"{name if port == 22 else f'[{name}]:{port}'} {key}\n"] = known_hosts
    if not sys.stdin.isatty():
        raise UserError(
            "No host was accepted: a person has to confirm these keys. Run it in a terminal."
        )
    print("Compare them on each host: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub")
    print("Are these the keys of these hosts? (yes/no) ", end="", flush=True)
    if sys.stdin.readline().strip().lower() != "yes":
        raise UserError("No host was accepted, and nothing has changed.")
    for line, known_hosts in lines.items():
        known_hosts.parent.mkdir(mode=0o700, exist_ok=True)
        with known_hosts.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read() == b"\n" else f"\n{line}"
            file.write(line.encode())


def _settings(host: Host) -> dict[str, list[str]]:
    """ssh's options for a host, with the user's configuration."""
    port = ["-p", str(host.port)] if host.port else []
    found: dict[str, list[str]] = {}
    for line in _run(["ssh", "-G", *port, "--", host.ssh_target]).stdout.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    if "hostname" not in found:
        raise UserError(f"ssh -G {host.ssh_target} fails. Correct ~/.ssh/config.")
    return found


def _scan(name: str, port: int, jump: Host | None) -> str:
    """The host's key, "ssh-ed25519 AAAA…", as it is seen from here or from the jump host."""
    line = f"ssh-keyscan -T {_SCAN_S} -p {port} -f -"
    by = Host("localhost") if jump is None else jump
    answer = _run(shell_command(by, line), f"{name}\n")
    kinds = dict(re.findall(r"^[^#\s]\S* (\S+) ([A-Za-z0-9+/=]+)$", answer.stdout, re.MULTILINE))
    if not (kind := next((kind for kind in _PREFERRED if kind in kinds), "")):
        raise UserError(f"{name}: it sends ssh-keyscan no key. Try: ssh-keyscan -p {port} {name}")
    return f"{kind} {kinds[kind]}"


def _fingerprint(key: str) -> str:
    """ "SHA256:… (ED25519)"."""
    _, fingerprint, *_, kind = _run(["ssh-keygen", "-lf", "-"], f"{key}\n").stdout.split()
    return escaped(f"{fingerprint} {kind}")


def _public_key(host: Host) -> str:
    """The public key that ssh offers first. It is made if there is none."""
    offered = map(_path, _settings(host)["identityfile"])
    own = next((path for path in offered if path.exists()), None)
    if own is None:
        own = _path("~/.ssh/id_ed25519")
        own.parent.mkdir(mode=0o700, exist_ok=True)
        # mpirun's ssh can ask nobody for a passphrase.
        done = _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(own)])
        if done.returncode:
            raise UserError(f"ssh-keygen cannot make {own}: {done.stderr.strip()}")
        print(f"{own} is a new key, without a passphrase")
    public = own.with_name(f"{own.name}.pub")
    if public.exists():
        key = public.read_text(errors="replace").strip()
    else:
        # It may ask for the passphrase at the terminal.
        command = ["ssh-keygen", "-y", "-f", str(own)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, errors="replace")
        key = done.stdout.strip()
    if len(key.split()) < 2:
        make = f"ssh-keygen -y -f {shlex.quote(str(own))} > {shlex.quote(str(public))}"
        raise UserError(f"{own}: its public key cannot be read. Make it: {make}")
    return key


def _add_key(host: Host, key: str, jump: Host | None) -> None:
    command = _by_jump(shell_command(host, _ADD_KEY, batch=False), jump)
    done = subprocess.run(
        command, input=f"{key}\n", text=True, errors="replace", stderr=subprocess.PIPE
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise UserError(
            f"{host.name}: the key could not be copied ({last[0].rstrip('.')}). "
            f"Add this line to ~/.ssh/authorized_keys there: {key}"
        )


def reached(
    hosts: Sequence[Host], jump: Host | None
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """For each host the names of the others to which it can log in, and those of which nobody knows.

    From here all have been reached. A host that is lost, or out of time, tells only a part.
    """
    inputs: dict[Host, str] = {}
    for index, host in enumerate(hosts):
        if not is_this_host(host.name):
            # Each begins with the next one, so that not all log in to the same host at once.
            rest = [*hosts[index + 1 :], *hosts[:index]]
            inputs[host] = "".join(
                f"{each.name} {each.ssh_target} {each.port or ''}\n" for each in rest
            )
    found = {host.name: [each.name for each in hosts if each != host] for host in hosts}
    unknown: dict[str, list[str]] = {}
    more_s = min(_LOGIN_S * len(hosts), _LOGINS_S)
    for host, answer in _on_each(_REACH, inputs, jump, _ANSWER_S + more_s).items():
        others = found[host.name]
        yes, no = (
            re.findall(rf"^{word} (.*)\n", answer.stdout, re.MULTILINE)
            for word in (_REACHES, _MISSES)
        )
        found[host.name] = [name for name in others if name in yes]
        unknown[host.name] = [name for name in others if name not in yes + no]
    return found, unknown


def summary(
    reached: Mapping[str, Sequence[str]],
    unknown: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[str]:
    """Which host reaches which, hosts of the same kind together."""
    texts: dict[str, str] = {}
    for name, found in reached.items():
        unsure = unknown.get(name, ())
        missed = [each for each in reached if each not in (name, *found, *unsure)]
        texts[name] = _text(found, missed, unsure)
    return [f"{compress_names(names)}: {text}" for text, names in names_by_value(texts).items()]


def _text(found: Sequence[str], missed: Sequence[str], unknown: Sequence[str]) -> str:
    if not missed and not unknown:
        return "reaches every other host"
    if not found and not unknown:
        return "reaches no other host"
    if not found and not missed:
        return "which other hosts it reaches is not known"
    text = f"reaches {compress_names(found)}" if found else ""
    text += f"{', not' if found else 'does not reach'} {compress_names(missed)}" if missed else ""
    return text + (f"; not known: {compress_names(unknown)}" if unknown else "")


def _on_each(
    line: str, inputs: Mapping[Host, str], jump: Host | None, limit_s: float = _ANSWER_S
) -> dict[Host, Done]:
    """Run `line` in a shell on each host, with its stdin, without a question to the user."""
    commands = [_by_jump(shell_command(host, line), jump) for host in inputs]
    with ThreadPoolExecutor(_AT_ONCE if jump is None else _AT_ONCE_BY_JUMP) as pool:
        done = pool.map(partial(_run, limit_s=limit_s), commands, inputs.values())
        return dict(zip(inputs, done, strict=True))


def _by_jump(command: list[str], jump: Host | None) -> list[str]:
    return command if jump is None else [command[0], "-J", _jump_text(jump), *command[1:]]


def _run(command: Sequence[str], stdin: str = "", limit_s: float = _ANSWER_S) -> Done:
    """The outcome of a command; of one that does not end in time, what it has printed until then."""
    try:
        return subprocess.run(
            command, input=stdin, capture_output=True, timeout=limit_s, text=True, errors="replace"
        )
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or b""  # as bytes, also with text=True
        return Done(command, 1, printed.decode(errors="replace"), "timed out")


def _path(path: str) -> Path:
    """A path of ssh's options. ssh takes the home folder from the user's entry, not from $HOME."""
    return Path(re.sub("^~(?=/)", pwd.getpwuid(os.getuid()).pw_dir, path))
