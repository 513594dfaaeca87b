"""The input from which `mpiddp launch` composes a command: options, hosts, GPUs, the MPI.

Tests mpiddp/launch/plan.py, mpiddp/launch/options.py.
python -m pytest tests/unit/launch/test_launch_input.py
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts import facts
from mpiddp.hosts.allocations import expand_counts, expand_nodelist, find_allocation
from mpiddp.hosts.hostfile import Hosts, parse_host_list, parse_hostfile
from mpiddp.hosts.interfaces import Interface
from mpiddp.hosts.names import is_own_address, is_this_host
from mpiddp.launch import network
from mpiddp.launch.network import find_network, requested_networks
from mpiddp.launch.options import parse_options
from mpiddp.launch.place import place, ranks_by_host, with_slots
from mpiddp.launch.preflight import HostInfo
from mpiddp.launch.starters.table import find_starter, identify
from mpiddp.launch.variables import check_gpu_choice
from tests.support.errors import error
from tests.support.homes import leave_home
from tests.support.patience import PATIENCE_S
from tests.unit.launch.test_starters import MPIS


def placed(
    hosts: Hosts, gpus: dict[str, int], *arguments: str, backend: str | None = None
) -> Hosts:
    """The hosts with their ranks, if the preflight has found `gpus`."""
    options = parse_options(["-H", "x", *arguments, __file__])
    infos = {
        host: HostInfo(host, True, True, True, "", "", "", gpus[host.name], ())
        for host in hosts.hosts
        if host.name in gpus
    }
    slots = with_slots(hosts, infos, replace(options, backend=backend), {})
    return place(slots, options, MPIS["openmpi5"].kind)


def ranks(hosts: Hosts) -> list[int]:
    return [host.ranks for host in hosts.hosts]


def test_slots_of_a_bare_host_are_its_gpus_or_one() -> None:
    hosts = parse_host_list("gpus.invalid,cpu.invalid,few.invalid:2")
    found = {"gpus.invalid": 8, "cpu.invalid": 0, "few.invalid": 0}
    assert ranks(placed(hosts, found)) == [8, 1, 2]


def gpu_tool(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi on PATH that lists two GPUs. No machine of the tests has one."""
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho 'GPU 1: A (UUID: y)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.defpath}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_slots_of_this_machine_are_reduced_to_its_gpus_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hosts = parse_host_list("localhost:4")
    assert ranks(placed(hosts, {}, backend="nccl")) == [4]  # without a GPU
    gpu_tool(tmp_path, monkeypatch)
    assert ranks(placed(hosts, {})) == [2]
    note = "mpiddp: localhost has 2 GPUs but 4 slots: starting only 2 ranks there; "
    assert capfd.readouterr().err.startswith(note)
    assert ranks(placed(hosts, {}, backend="gloo")) == [4]
    assert capfd.readouterr().err == ""
    values = ("-H: localhost ", "2 GPUs", "4 slots", "slots=2,", "--backend nccl")
    with pytest.raises(UserError, match=f"^{error('leave out', *values)}$"):
        placed(hosts, {}, backend="nccl")


@pytest.mark.parametrize(("visible", "count"), [(None, 2), ("1", 1), ("", 1)])
def test_the_ranks_of_a_bare_machine_are_the_gpus_that_they_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    gpu_tool(tmp_path, monkeypatch)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ranks(placed(parse_host_list("localhost"), {})) == [count]


def test_the_tool_of_a_vendor_is_on_the_path_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_tool(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", os.defpath)
    options = parse_options(["-H", "x", __file__])
    for path, slots in ((f"{tmp_path}:{os.defpath}", 2), (os.defpath, 1)):
        found = with_slots(parse_host_list("localhost"), {}, options, {"PATH": path})
        assert [host.slots for host in found.hosts] == [slots]


def test_too_few_gpus_on_one_of_several_hosts(capfd: pytest.CaptureFixture[str]) -> None:
    """A job that uses GPUs is refused. If the launcher cannot know, it prints a note."""
    hosts = parse_host_list("localhost:1,far.invalid:4")
    found = {"localhost": 2, "far.invalid": 2}
    sentence = error("share GPUs", "far.invalid ", "2 GPUs", "4 slots")
    for backend in ("nccl", "auto"):
        with pytest.raises(UserError, match=f"^{sentence}$"):
            placed(hosts, found, backend=backend)
    assert ranks(placed(hosts, found, backend="gloo")) == [1, 4]
    assert capfd.readouterr().err == ""
    assert ranks(placed(hosts, found)) == [1, 4]
    assert capfd.readouterr().err == (
        "mpiddp: far.invalid has 2 GPUs but 4 slots: ranks that use GPUs would share them, which NCCL "
        "refuses\n"
    )


def test_slots_that_a_scheduler_counts_in_cores_are_reduced_to_gpus(
    capfd: pytest.CaptureFixture[str],
) -> None:
    hosts = replace(parse_host_list("n1.invalid:32,n2.invalid:32"), scheduler="Slurm")
    found = {"n1.invalid": 4, "n2.invalid": 4}
    for backend in ("nccl", "auto", None):
        assert ranks(placed(hosts, found, backend=backend)) == [4, 4]
        note = "mpiddp: n1.invalid has 4 GPUs but 32 slots: starting only 4 ranks there; "
        assert capfd.readouterr().err.startswith(note)
    assert ranks(placed(hosts, dict.fromkeys(found, 0), backend="auto")) == [32, 32]


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


def test_this_machine_gets_its_own_name() -> None:
    hosts = placed(parse_host_list("far.invalid:1,me@localhost:2"), {})
    own = socket.gethostname()
    assert [(host.name, host.ranks, host.user) for host in hosts.hosts] == [
        ("far.invalid", 1, None),
        (own, 2, None),
    ]
    assert ranks_by_host(hosts) == ["far.invalid: rank 0", f"{own}: ranks 1-2"]
    assert is_this_host("127.0.0.1")
    assert not is_this_host("192.0.2.1")  # reserved for documentation


def test_a_name_with_an_address_of_a_kind_that_this_kernel_lacks() -> None:
    """As with IPv6 where it is switched off. No kernel has DECnet any more."""
    assert not is_own_address(socket.AF_DECnet, ("fd00::1",))


def test_the_network_is_the_requested_one_or_the_one_that_reaches_all_hosts() -> None:
    here, far = parse_host_list("localhost:1"), parse_host_list("localhost:1,far.invalid:1")
    requested = find_network(far, (), "127.0.0.1")
    assert (requested.interface and requested.interface.name) == "lo"
    assert requested.networks == ("127.0.0.0/8",)  # other hosts have other addresses on it
    assert requested.control_address == "127.0.0.1"
    assert requested_networks("lo") == ("lo",)
    missing = error("interface", '"nope"', socket.gethostname(), "lo (127.0.0.1)")
    with pytest.raises(UserError, match=missing):
        find_network(far, (), "nope")
    alone = find_network(here, (), None)
    assert (alone.interface, alone.networks, alone.control_address) == (None, (), "127.0.0.1")
    unknown = find_network(far, (), None, dry_run=True)
    assert (unknown.interface, unknown.networks, unknown.control_address) == (None, (), "")
    unreachable = error("reach. Name", " far.invalid ", ": --interface NAME ")
    with pytest.raises(UserError, match=f"^{unreachable}$"):
        find_network(far, (), None)


def test_ssh_knows_the_address_of_a_name_that_does_not_resolve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real `ssh -G`, with a configuration of its own."""
    ssh, config = shutil.which("ssh"), tmp_path / "config"
    if ssh is None:
        pytest.skip("ssh is not installed")
    config.write_text("Host far.invalid\n  HostName 127.0.0.2\n")
    program = tmp_path / "ssh"
    program.write_text(f'#!/bin/sh\nexec {ssh} -F {config} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    network = find_network(parse_host_list("localhost:1,far.invalid:1"), (), None)
    assert network.control_address == "127.0.0.1"  # from which a packet to 127.0.0.2 would come


ETH0 = Interface("eth0", "10.0.0.1", "10.0.0.0/24")
IB0 = Interface("ib0", "10.1.0.1", "10.1.0.0/16")
LO = Interface("lo", "127.0.0.1", "127.0.0.0/8")
BY_ETH0, BY_IB0, ROUTED = (
    ("10.0.0.1", "10.0.0.2"),
    ("10.1.0.1", "10.1.9.2"),
    ("10.0.0.1", "172.16.0.1"),
)


@pytest.mark.parametrize(
    ("routes", "theirs", "expected"),
    [
        ([BY_ETH0, ("10.0.0.1", "10.0.0.3")], ["eth0", "eth0"], ("eth0", ("eth0",), "10.0.0.1")),
        ([BY_IB0, BY_IB0], ["eth0", "eth0"], ("ib0", ("10.1.0.0/16",), "10.1.0.1")),
        ([BY_ETH0, BY_ETH0], ["eth0", "ens1"], ("eth0", ("10.0.0.0/24",), "10.0.0.1")),
        ([BY_ETH0, BY_ETH0], [], ("eth0", ("10.0.0.0/24",), "10.0.0.1")),
        ([BY_ETH0, ROUTED], ["eth0", "eth0"], ("eth0", (), "10.0.0.1")),
        ([BY_IB0, BY_ETH0], ["eth0", "eth0"], (None, (), "10.1.0.1")),
        ([None, BY_ETH0], ["eth0", "eth0"], (None, (), "10.0.0.1")),
        ([("127.0.0.1", "127.0.0.2")] * 2, [], (None, (), "127.0.0.1")),
    ],
)
def test_the_network_by_the_routes_to_the_other_hosts(
    monkeypatch: pytest.MonkeyPatch,
    routes: list[tuple[str, str] | None],
    theirs: list[str],
    expected: tuple[str | None, tuple[str, ...], str],
) -> None:
    """The routes are this machine's address and the host's. `theirs` are the names of their links."""
    hosts = parse_host_list("localhost:1,a.invalid:1,b.invalid:1")
    by_name = dict(zip(("a.invalid", "b.invalid"), routes, strict=True))
    monkeypatch.setattr(network, "_route", by_name.get)
    monkeypatch.setattr(network, "interfaces", lambda: [LO, ETH0, IB0])
    infos = [
        HostInfo(host, True, True, True, "", "", "", 0, (Interface(name, "", "10.0.0.0/24"),))
        for host, name in zip(hosts.hosts[1:], theirs, strict=False)
    ]
    found = find_network(hosts, infos, None)
    name = found.interface.name if found.interface else None
    assert (name, found.networks, found.control_address) == expected


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
    ],
)
def test_a_list_that_slurm_never_writes(nodelist: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        expand_nodelist(nodelist)


@pytest.mark.parametrize("counts", ["", "1(x999999999)", "2(x0)", "²", "9" * 5000])
def test_counts_that_slurm_never_writes(counts: str) -> None:
    with pytest.raises(ValueError, match=r"count|more"):
        expand_counts(counts)


def test_an_mpirun_without_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user is not in /etc/passwd."""
    leave_home(monkeypatch)
    sentence = error("such program", "--mpirun ~/mpirun: ")
    with pytest.raises(UserError, match=sentence):
        find_starter("mpirun", "~/mpirun", tmp_path / "python", {})


def test_an_mpirun_that_prints_no_text(tmp_path: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_bytes(b"#!/bin/sh\nprintf '\\377 (Open MPI) 5rc1'\n")
    program.chmod(0o755)
    assert identify(program, os.environ).version == "5rc1"


ALLOCATED = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}


@pytest.mark.parametrize(
    ("env", "slots"),
    [
        ({**ALLOCATED, "SLURM_NTASKS": "8"}, [4, 4]),
        ({**ALLOCATED, "SLURM_GPUS_ON_NODE": "2"}, [2, 2]),
        ({**ALLOCATED, "SLURM_GPUS_ON_NODE": "0"}, [1, 1]),
        ({**ALLOCATED, "SLURM_GPUS_PER_NODE": "2"}, [2, 2]),  # in the shell of salloc
        ({**ALLOCATED, "SLURM_GPUS_PER_NODE": "a100:2,h100:1"}, [3, 3]),
        (ALLOCATED, [1, 1]),
    ],
)
def test_a_slurm_allocation_and_its_slots(env: dict[str, str], slots: list[int]) -> None:
    allocation = find_allocation(env)
    assert allocation is not None
    assert allocation.starter == "srun"
    assert [(host.name, host.slots) for host in allocation.hosts] == list(
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
    ("answer", "name", "daemon"),
    [
        ("mpirun (Open MPI) 4.1.8", "Open MPI 4.1.8", "orted"),
        ("mpirun (Open MPI) 5.0.9rc1", "Open MPI 5.0.9rc1", "prted"),
        ("mpirun (Open MPI) 10.0.0", "Open MPI 10.0.0", "prted"),
        ("HYDRA build details:\n    Version:      4.3.0", "MPICH 4.3.0", "hydra_pmi_proxy"),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 2026",
            "Intel MPI 2021.18.1",
            "hydra_bstrap_proxy",
        ),
        ("slurm-wlm 22.05.8", "Slurm's srun 22.05.8", ""),
    ],
)
def test_kind_and_version(tmp_path: Path, answer: str, name: str, daemon: str) -> None:
    starter = identify(fake_mpirun(tmp_path, answer), os.environ)
    assert (starter.name, starter.kind.daemon) == (name, daemon)


NAMES = "Open MPI, Intel MPI or MPICH"


def test_a_program_that_prints_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    program = fake_mpirun(tmp_path, "")
    program.write_text("#!/bin/sh\nexec yes not an mpirun\n")
    values = (f"{program} --version ", '"not an mpirun"', NAMES, ": --mpirun PATH ")
    with pytest.raises(UserError, match=f"^{error('--version prints', *values)}$"):
        identify(program, os.environ)


def test_a_program_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "VERSION_S", 0.1)
    program = fake_mpirun(tmp_path, "")
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    silent = error("--version cannot", f"{program} --version ", " 10 s", ": --mpirun PATH ")
    with pytest.raises(UserError, match=silent):
        identify(program, os.environ)


def test_a_shell_script_whose_program_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Intel's mpirun. What it has started holds the pipe, and ends with it."""
    monkeypatch.setattr(facts, "VERSION_S", 0.1)
    program = fake_mpirun(tmp_path, "")
    program.write_text(f"#!/bin/sh\nsleep {2 * PATIENCE_S:.0f}\nexit 0\n")
    silent = error("--version cannot", f"{program} --version ", " 10 s", ": --mpirun PATH ")
    began_at = time.monotonic()
    with pytest.raises(UserError, match=silent):
        identify(program, os.environ)
    assert time.monotonic() - began_at < PATIENCE_S


def test_find_mpirun_prefers_the_option_then_pythons_folder_then_path(tmp_path: Path) -> None:
    for name in ("named", "venv", "path"):
        (tmp_path / name).mkdir()
        fake_mpirun(tmp_path / name, "mpirun (Open MPI) 5.0.11")
    named, beside, on_path = (tmp_path / name / "mpirun" for name in ("named", "venv", "path"))
    env = {"PATH": str(on_path.parent)}

    def find(explicit: str | None, python: Path) -> Path:
        return find_starter("mpirun", explicit, python, env).program

    assert find(str(named), beside.with_name("python")) == named
    assert find(None, beside.with_name("python")) == beside
    assert find(None, tmp_path / "python") == on_path


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: placed(parse_host_list("far.invalid"), {}),
            error("and without", "-H: far.invalid ", "Write: far.invalid slots=N "),
        ),
        (
            lambda: placed(parse_hostfile(b"far.invalid gpus=0,5", "f"), {"far.invalid": 4}),
            error("They are", "far.invalid ", "4 GPUs", "GPU 5 (gpus=0,5)"),
        ),
        (
            lambda: check_gpu_choice(
                parse_hostfile(b"far gpus=0\n", "f"), {"CUDA_VISIBLE_DEVICES": None}
            ),
            error("both choose", "f:1: gpus=", "-x CUDA_VISIBLE_DEVICES ", " far."),
        ),
        (
            lambda: find_allocation({**ALLOCATED, "SLURM_GPUS_ON_NODE": "two"}),
            error("or -H, or", "Slurm job ", "'two'"),
        ),
    ],
)
def test_bad_input_is_one_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        call()
    assert re.fullmatch(sentence, str(refused.value)), refused.value


def test_a_program_that_is_not_an_mpirun_is_refused(tmp_path: Path) -> None:
    program = fake_mpirun(tmp_path, "ls (GNU coreutils) 9.1")
    values = ('"ls (GNU coreutils) 9.1"', NAMES, ": --mpirun PATH ")
    with pytest.raises(UserError, match=error("--version prints", *values)):
        identify(program, os.environ)


def test_an_mpirun_of_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """./mpirun is not the mpirun on PATH."""
    answer = "mpirun (Open MPI) 5.0.11"
    here = fake_mpirun(tmp_path, answer)
    (tmp_path / "path").mkdir()
    env = {"PATH": str(fake_mpirun(tmp_path / "path", answer).parent)}
    monkeypatch.chdir(tmp_path)
    python = Path("/nowhere/python")
    assert find_starter("mpirun", "./mpirun", python, env).program == here
    on_path = find_starter("mpirun", "mpirun", python, env).program
    assert on_path == tmp_path / "path" / "mpirun"


@pytest.mark.parametrize("first_line", ["#!/opt/conda/bin/python3.12 -u", "import os", "", "# é"])
def test_a_python_script_without_the_suffix(tmp_path: Path, first_line: str) -> None:
    (tmp_path / "train").write_text(f"{first_line}\n")
    assert not parse_options([str(tmp_path / "train")]).job.is_command


@pytest.mark.parametrize(
    ("argv", "command", "kind"),
    [
        (["-n", "2", __file__, "-n", "9", "-m", "x"], [__file__, "-n", "9", "-m", "x"], "script"),
        (["-m", "pkg.train", "--dry-run", "-H"], ["pkg.train", "--dry-run", "-H"], "module"),
        (["-m", "pkg.train", "--", "a", "--"], ["pkg.train", "--", "a", "--"], "module"),
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
