"""A plugin of pytest for .ci/run: few repeats, each of which is reported, and no skip without a known reason.

`-p tests.support.strict` repeats a failed test at once, beside the tests that run at the same time, if

- it is a test of real ranks or of the cluster,
- its report has the text of a known failure of an MPI or of gloo (known_failures.ini), and
- fewer than MAX_REPEATS tests were repeated before.

A failure that nobody knows is a failure. The end of the output names each repeated test as a flake, with the
failure. A skip whose reason is not in allowed_skips.txt fails the run.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from _pytest.terminal import TerminalReporter

MAX_REPEATS = 2
REPEATED_TIERS = ("ranks", "cluster")
HERE = Path(__file__).parent
# The folder in which all processes of one run count its repeats. They inherit the variable.
COUNTED = "MPIDDP_TEST_REPEATS"


@dataclass(frozen=True)
class KnownFailure:
    """A failure of other software: its name, a text that a report of it has, and why it happens."""

    name: str
    pattern: str
    reason: str


def known_failures(file: Path = HERE / "known_failures.ini") -> list[KnownFailure]:
    table = configparser.ConfigParser(interpolation=None)
    table.read_string(file.read_text())
    return [
        KnownFailure(each, table[each]["pattern"], table[each]["reason"])
        for each in table.sections()
    ]


def allowed_skips(file: Path = HERE / "allowed_skips.txt") -> list[str]:
    return [line for line in file.read_text().splitlines() if line and not line.startswith("#")]


def find_known(text: str, failures: Iterable[KnownFailure]) -> KnownFailure | None:
    """The first known failure whose pattern the text of a report has."""
    return next((each for each in failures if re.search(each.pattern, text)), None)


def may_repeat(nodeid: str) -> bool:
    """Whether the test lies in a folder of real ranks."""
    return nodeid.startswith(tuple(f"tests/{tier}/" for tier in REPEATED_TIERS))


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """Why the test, or a file, was skipped; None if it ran. An expected failure is no skip."""
    if not report.skipped or hasattr(report, "wasxfail") or not isinstance(report.longrepr, tuple):
        return None
    return str(report.longrepr[2]).removeprefix("Skipped: ")


def take_repeat(folder: Path) -> bool:
    """Take one of the repeats that the processes of this run have left."""
    for number in range(MAX_REPEATS):
        try:
            (folder / str(number)).touch(exist_ok=False)
        except FileExistsError:
            continue
        return True
    return False


class Strict:
    """The hooks. Each process that runs tests has one, and so has the one that prints the report."""

    def __init__(self, repeats: Path) -> None:
        self.repeats = repeats
        self.failures = known_failures()
        self.allowed = allowed_skips()
        self.unknown: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        if not may_repeat(item.nodeid):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        known = self._known_failure_of(reports)
        if known is not None and take_repeat(self.repeats):
            for report in reports:
                if report.failed:
                    report.outcome = "repeated"  # type: ignore[assignment]
                    report.sections.insert(0, ("known failure", f"{known.name}: {known.reason}"))
                    item.ihook.pytest_runtest_logreport(report=report)
            _start_afresh(item)
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _known_failure_of(self, reports: list[pytest.TestReport]) -> KnownFailure | None:
        """The known failure, if each phase that failed has one."""
        failed = [report for report in reports if report.failed]
        texts = [
            "\n".join([each.longreprtext, *(text for _, text in each.sections)]) for each in failed
        ]
        found = [find_known(text, self.failures) for text in texts]
        return found[0] if found and all(found) else None

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return ("repeated", "R", "REPEATED") if report.outcome == "repeated" else None  # type: ignore[comparison-overlap]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._check_skip(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._check_skip(report)

    def _check_skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = reason_of(report)
        if reason is not None and not any(
            re.fullmatch(each, reason, re.DOTALL) for each in self.allowed
        ):
            self.unknown.append(f"{report.nodeid}: {reason}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unknown and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        if self.unknown:
            terminalreporter.section("skips without an allowed reason", red=True, bold=True)
            for line in sorted(set(self.unknown)):
                terminalreporter.line(
                    f"{line}\n    To allow it: tests/support/allowed_skips.txt", red=True
                )
        for report in terminalreporter.stats.get("repeated", []):
            terminalreporter.section(f"flake: {report.nodeid}", yellow=True, bold=True)
            terminalreporter.line(f"It was repeated. {report.sections[0][1]}")
            terminalreporter.line(report.longreprtext)


def _start_afresh(item: pytest.Item) -> None:
    """Tear the fixtures of every scope down, so that the repeat has ranks and hosts of its own."""
    item.session._setupstate.teardown_exact(None)
    item._initrequest()  # type: ignore[attr-defined]


def pytest_configure(config: pytest.Config) -> None:
    if COUNTED not in os.environ:
        os.environ[COUNTED] = folder = tempfile.mkdtemp(prefix="mpiddp-repeats-")
        config.add_cleanup(lambda: _forget(folder))
    config.pluginmanager.register(Strict(Path(os.environ[COUNTED])), "strict")


def _forget(folder: str) -> None:
    del os.environ[COUNTED]
    shutil.rmtree(folder, ignore_errors=True)
