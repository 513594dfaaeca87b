"""The options of `mpiddp launch`, what users of other launchers type, and the variables of the ranks.

Tests mpiddp/launch/plan/{options,environment}.py. The promises have the command line for each MPI.
"""

import os
import re
from dataclasses import replace

import pytest

from mpiddp.arguments import as_arguments
from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host
from mpiddp.launch.plan.environment import Environment, gpu_table, parse_env_file, without_values
from mpiddp.launch.plan.job_plan import read_hosts
from mpiddp.launch.plan.options import (
    BY_HOSTFILE,
    LaunchOptions,
    launch_of_train,
    option_parser,
    parse_options,
    variables_of_options,
)
from tests.support.ranks import ROOT, script

JOB = ("-m", "train", "--lr", "1")
DEFAULTS = LaunchOptions(JOB)
HOSTFILE = ROOT / "hostfiles" / "local"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MPIDDP_LOG_RANKS", "MPIDDP_PREFIX", "MPIDDP_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)


def parsed(options: str) -> LaunchOptions:
    return parse_options([*options.split(), *JOB])


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ("", {}),
        ("--no-check", {"check": False}),
        ("--wait-for-hosts 10m", {"wait_s": 600.0}),
        ("-x A=2 -x B=1", {"exports": ("A=2", "B=1"), "settings": {"A": "2", "B": "1"}}),
        ("--mpi-args=-v --mpi-args= --mpi-args=--a_b", {"mpi_args": ("-v", "--a_b")}),
        ("--stop-after 55m", {"stop_after_s": 3300.0}),
        ("-v", {"verbose": True}),
        # What users of mpirun, torchrun and others type:
        ("-np 2", {"n": 2}),
        ("--nproc-per-node 2", {"npernode": 2}),
        ("--nproc_per_node=2", {"npernode": 2}),
        ("--nproc_per_node gpu", {"needs_gpus": True}),
        ("--nproc-per-node cpu", {"npernode": len(os.sched_getaffinity(0))}),
        ("--nproc_per_node auto", {}),
        (
            "--nnodes=1 --nproc_per_node=4 --rdzv_id=7 --rdzv-backend c10d --rdzv_endpoint=a:2",
            {"npernode": 4, "host_list": "localhost"},
        ),
        ("--nnodes=2:4 --rdzv-backend c10d", {"min_hosts": 2, "max_hosts": 4}),
        ("--nnodes 1:3 --min-hosts 1", {"min_hosts": 1, "max_hosts": 3}),
        ("--standalone --rdzv-conf timeout=9", {"host_list": "localhost"}),
        ("--host a", {"host_list": "a"}),
        ("--hosts a:2,b:2", {"host_list": "a:2,b:2"}),
        (f"--machinefile {HOSTFILE}", {"hostfile": str(HOSTFILE)}),
        ("--max_restarts 3 -n 1", {"max_restarts": 3, "n": 1}),
        ("-np 4 -bind-to none -map-by slot -mca pml ob1 --mca btl ^openib", {"n": 4}),
        ("--bind-to=core --pernode -tag-output", {"bind": "core", "npernode": 1}),
        ("-mca btl_tcp_if_include eth0", {"interface": "eth0"}),
        ("--map-by ppr:2:node --timestamp-output", {"npernode": 2, "timestamps": True}),
        ("-ppn 2 --allow-run-as-root --output-filename x", {"npernode": 2, "log_dir": "x"}),
    ],
)
def test_what_an_option_becomes(options, fields):
    assert parsed(options) == replace(DEFAULTS, **fields)


def test_a_variable_stands_for_each_option_with_one_value(monkeypatch, tmp_path):
    """It is not taken for an option that was typed. The hostfile and the command line take precedence."""
    values = {
        "PREFIX": "never",
        "TIMEOUT": "3m",
        "INTERFACE": "ib0",
        "LOG_DIR": "logs",
        "GRACE": "1m",
        "LOG_RANKS": "",
        "REQUEUE": "1",
    }
    for name, value in values.items():
        monkeypatch.setenv(f"MPIDDP_{name}", value)
    expected = replace(
        DEFAULTS,
        prefix="never",
        timeout_s=180.0,
        interface="ib0",
        log_dir="logs",
        grace_s=60.0,
        requeue=True,
    )
    assert parsed("") == expected
    assert parsed("--timeout 90") == replace(expected, timeout_s=90.0)
    hosts = tmp_path / "hosts"
    hosts.write_text("#: --grace 2m\nlocalhost slots=2\n")
    assert parsed(f"--hostfile {hosts}").grace_s == 120.0
    assert {"log_dir", "stop_after_s", "bind", "on_end"} <= variables_of_options().keys()
    assert (
        not {"hostfile", "n", "exclude", "push", "exports", "env_files"}
        & variables_of_options().keys()
    )
    for name, value, why in (
        ("LOG_RANKS", "x", "expected all, none, or ranks"),
        ("BIND", "gpu", "expected none, numa, core"),
    ):
        with monkeypatch.context() as context:
            context.setenv(f"MPIDDP_{name}", value)
            with pytest.raises(UserError, match=f"^MPIDDP_{name}: {why}"):
                parsed("")


def test_a_hostfile_may_set_each_variable_of_the_pages(tmp_path):
    """Of the page that the program writes alone, the variables are the list itself."""
    files = [*(ROOT / "docs").glob("*.md"), *(ROOT / "hostfiles").iterdir(), ROOT / "README.md"]
    texts = [file.read_text() for file in files if file.name != "reference.md"]
    names = {*re.findall(r"(?<![A-Z_])(?:NCCL|GLOO|UCX)_[A-Z_]+", "\n".join(texts))}
    assert {"NCCL_DEBUG", "NCCL_IB_HCA", "NCCL_SOCKET_FAMILY", "UCX_TLS"} <= names
    hosts = tmp_path / "hosts"
    for name in names:
        hosts.write_text(f"#: -x {name}=1\nlocalhost\n")
        assert parsed(f"--hostfile {hosts}").settings == {name: "1"}


@pytest.mark.parametrize("field", BY_HOSTFILE)
def test_the_command_line_takes_an_option_of_a_hostfile_back(field, tmp_path):
    """Also that of `mpiddp drill` or `doctor`, which passes it to a launch, and by a value that is the default."""
    hosts, name = (
        tmp_path / "hosts",
        LaunchOptions.__dataclass_fields__[field].metadata["option"].names[0],
    )
    default, is_time = getattr(DEFAULTS, field), field.endswith("_s")
    text = {"exports": "NCCL_DEBUG=INFO", "exclude": "b"}.get(field, "7m" if is_time else "x")
    hosts.write_text(f"#: {name} {text}\na slots=1\nb slots=1\n")
    of_hostfile = parsed(f"--hostfile {hosts}")
    assert (of_hostfile.settings if field == "exports" else getattr(of_hostfile, field)) not in (
        {},
        default,
    )
    back = [["-x", "NCCL_DEBUG-"]] if field == "exports" else [[f"{name}="], [name, ""]]
    back += [[name, str(default)]] if is_time and default else []
    parser = option_parser()
    for words in back:
        argv = ["--hostfile", str(hosts), *words, *JOB]
        of_launch = [
            action
            for action in parser._actions
            if action.dest in LaunchOptions.__dataclass_fields__
        ]
        passed = [*as_arguments(of_launch, parser.parse_args(argv)), *JOB]
        for options in (parse_options(argv), parse_options(passed)):
            expected = {"NCCL_DEBUG": None} if field == "exports" else {}
            assert options.settings == expected
            assert field == "exports" or getattr(options, field) == default


def test_the_short_help_fits_the_smallest_screen(capsys, monkeypatch):
    """docs/command-line.md has the whole one."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse_options(["--help"])
    short = capsys.readouterr().out
    assert sum(len(line) // 80 + 1 for line in short.splitlines()) <= 24
    assert "--max-restarts" in short
    assert "--mpi-args" not in short


@pytest.mark.parametrize(
    ("source", "flag"),
    [
        ("parser.add_argument('--dry-run')", "--dry-run"),
        ("parser.add_argument('--dry_run')", "--dry-run"),
        ("from package.cli import main", "--help"),
        ("from transformers import HfArgumentParser", "-h"),
        ("parse('-n')", "-n"),
        ("import settings", "--log-dir"),  # which it imports
        ("from transformers import HfArgumentParser\nclass A:\n    timeout: int", "--timeout"),
        ("parser.add_argument('--x')", "--lr"),
    ],
)
def test_an_option_that_the_script_takes(tmp_path, source, flag):
    (tmp_path / "settings.py").write_text("parser.add_argument('--log_dir')")
    job = (script(tmp_path, source), flag)
    assert parse_options([*job]).job == job


def test_a_range_of_hosts_takes_the_first_of_the_list():
    options = parse_options(["--nnodes", "1:2", "-H", "a:1,b:1,c:1", *JOB])
    assert [host.name for host in read_hosts(options, {}).hosts] == ["a", "b"]
    fewer = replace(options, host_list="a:1")  # refused at the first start (tests/refusals)
    assert len(read_hosts(fewer, {}, is_first=False).hosts) == 1


@pytest.mark.parametrize(
    ("typed", "launched"),
    [
        ("--hostfile f --epochs 2", "--hostfile f -m mpiddp train --epochs 2"),
        ("--use_syn -H a,b --log_dir=d", "-H a,b --log_dir=d -m mpiddp train --use_syn"),
        ("-n 2", "-n 2 -m mpiddp train"),
        ("--epochs 2 --out runs/a", None),
    ],
)
def test_a_training_with_options_of_a_launch_is_launched(typed, launched):
    assert launch_of_train(typed.split()) == (launched and launched.split())


@pytest.mark.parametrize(
    ("job", "command"),
    [
        (JOB, ("train", "--lr", "1")),
        (("--", "ls", "-v", "-h"), ("ls", "-v", "-h")),
        (("-m", "json.tool", "-n", "4"), ("json.tool", "-n", "4")),  # nobody knows its files
        ((__file__, "--", "-m"), (__file__, "--", "-m")),
    ],
)
def test_the_job(job, command):
    found = parse_options([*job])
    assert (found.job, found.command) == (job, command)


PASSED = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LD_PRELOAD", "TERM", "HF_TOKEN", "BASH_FUNC_ml%%"),
    *(
        "MASTER_ADDR",
        "MPI4PY_LIBMPI",
        "SLURM_JOB_ID",
        "SLURM_ARRAY_TASK_ID",
        "JOB_ID",
        "SGE_TASK_ID",
    ),
    *("LANGCHAIN_API_KEY", "PERL5LIB", "PEFT_MODE", "QUEUE_URL", "TASK_NAME", "TMPDIR_OF_MINE"),
)
OF_A_PLACE = (
    *("HOME", "USER", "PYTHONHOME", "PWD", "SSH_AUTH_SOCK", "LANG", "LC_ALL", "TMPDIR", "HOSTNAME"),
    *("SLURM_PROCID", "SLURMD_NODENAME", "PBS_NODEFILE", "PE", "FLUX_URI"),
)
# They belong to a scheduler only where it is present.
OF_A_USER = (
    "OMPI_MCA_btl",
    "FLUX_DEV",
    "QUEUE",
    "LS_API_KEY",
    "PBS_ROOT",
    "SLURM_USER_TOKEN",
    "ARC",
)


def test_every_variable_reaches_the_ranks_but_those_of_a_place():
    env = dict.fromkeys((*PASSED, *OF_A_PLACE), "1")
    assert Environment(env | {"CUDA_VISIBLE_DEVICES": "1"}).of_ranks == dict.fromkeys(PASSED, "1")
    users = dict.fromkeys(OF_A_USER, "1")
    assert Environment(users).of_ranks == users
    assert Environment(users | {"FLUX_URI": "1"}).of_ranks.keys() == users.keys() - {"FLUX_DEV"}


def test_gpus_that_an_option_chooses():
    here, env = [Host("localhost")], {"CUDA_VISIBLE_DEVICES": "1"}
    assert gpu_table(here, Environment(env)) == '[{"CUDA_VISIBLE_DEVICES":"1"}]'
    assert gpu_table(here, Environment(env, env)) == ""


FILE = r"""
# a comment
PLAIN=one two
export EXPORTED=three   # no comment
EMPTY=
SINGLE='as $written \n # ${HOME}'
DOUBLE="it's"
URL=postgres://u:p@h/db?a=b&c=$d
HERE
"""


def parse(text: str) -> dict[str, str]:
    return dict(parse_env_file(text.encode(), "f", {"HERE": "x"}))


def test_the_format_of_the_file():
    assert parse(FILE) == {
        "PLAIN": "one two",
        "EXPORTED": "three   # no comment",
        "EMPTY": "",
        "SINGLE": r"as $written \n # ${HOME}",
        "DOUBLE": "it's",
        "URL": "postgres://u:p@h/db?a=b&c=$d",
        "HERE": "x",
    }
    assert parse("\ufeffA=1\r\nB='2'\r\n") == {"A": "1", "B": "2"}  # as Windows writes it


def test_a_printed_command_has_no_values():
    exports = ["HF_TOKEN=abc", "MY_KEY=d=e", "A=h", "PLAIN=i", "TOKEN", "V="]
    own = ["-x", "HF_TOKEN=abc", "-xMY_KEY=d=e", "-x=A=h", "-vxPLAIN=i", "-x", "TOKEN", "-x", "V="]
    assert without_values([*own, "--hostfile", "f"], exports) == [
        *("-x", "HF_TOKEN=…", "-xMY_KEY=…", "-x=A=…", "-vxPLAIN=…", "-x", "TOKEN", "-x", "V=…"),
        *("--hostfile", "f"),
    ]
