"""From what the pairs of hosts say to lines: pure functions, as in `compare`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

from mpiddp.checks.compare import Facts, differences
from mpiddp.checks.report import FAIL, WARN, Found, Line, lines
from mpiddp.text import size_text

_T = TypeVar("_T")


def rounds(hosts: Sequence[_T]) -> Iterator[list[tuple[_T, _T]]]:
    """Every pair once, in rounds in which each host is in at most one: one host stays, the others turn."""
    ring: list[_T | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    half = len(ring) // 2
    for _ in range(len(ring) - 1):
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def mtu(facts: Facts, addresses: Mapping[str, str]) -> list[Line]:
    """Whether the interfaces of the job's network have the same MTU."""
    own = {name: facts[name]["interfaces"] for name in addresses}
    values = {
        name: each["mtu"]
        for name, found in own.items()
        for each in found
        if each["address"] == addresses[name]
    }
    mend = "ip link set dev INTERFACE mtu N, alike on the hosts and the switch"
    fact = differences("the MTU", values)
    well = f"MTU {max(values.values(), default='unknown')}"
    return lines("network", [(WARN, fact, mend)] if fact else [], well)


def reach(found: Mapping[str, Mapping[str, Any]], addresses: Mapping[str, str]) -> list[Line]:
    """Whether each host reaches each other on the job's network, in each direction, with large packets."""
    answers = [answer for each in found.values() for answer in each.values()]
    slowest = max((answer["latency_ms"] for answer in answers), default=0.0)
    well = f"all {len(answers)} directions open, slowest round trip {slowest:.2f} ms"
    return lines("network", _reach(found, addresses), well)


def _reach(found: Mapping[str, Mapping[str, Any]], addresses: Mapping[str, str]) -> Iterator[Found]:
    errors = {(a, b): answer["error"] for a in found for b, answer in found[a].items()}
    lonely = {
        name
        for name in found
        if len(found) > 2 and all(error for pair, error in errors.items() if pair[1] == name)
    }
    for name in sorted(lonely):
        (error, *_) = [error for pair, error in errors.items() if pair[1] == name]
        fact = f"no other host reaches {name} ({addresses.get(name)}): {error}"
        yield FAIL, fact, f"allow TCP on {name} from the other hosts; see: ssh {name} ip addr"
    for (here, there), error in errors.items():
        answer = found[here][there]
        if error and there not in lonely:
            way = "" if errors.get((there, here), "-") else f"; {there} → {here} is open"
            fact = f"{here} → {there} ({addresses.get(there)}) fails: {error}{way}"
            mend = (
                f"allow TCP from {here} on {there}; see: ssh {here} ip route get {addresses[there]}"
            )
            yield FAIL, fact, mend
        elif answer["large"]:
            fact = f"{here} → {there} carries small messages but no large ones ({answer['large']})"
            yield FAIL, fact, "set the same MTU on the hosts and the switch"
        elif not error and answer["source"] != addresses.get(here):
            fact = f"{here} → {there} takes {answer['source']}, not the job's {addresses.get(here)}"
            yield WARN, fact, f"see: ssh {here} ip route"


def slow_pairs(rates: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """The directions that carry less than half of the middle one."""
    usual = median(rates.values()) if rates else 0.0
    return {pair: rate for pair, rate in rates.items() if rate < usual / 2}


def rates(found: Mapping[tuple[str, str], float]) -> list[Line]:
    """The bytes a second of each direction; the slow ones against the others."""
    if not found:
        return []
    low, usual, high = (f"{size_text(f(found.values()))}/s" for f in (min, median, max))
    slow = [
        (
            WARN,
            f"{here} → {there} carries {size_text(rate)}/s, the middle pair {usual}",
            f"see the cable and the port: ssh {here} ip -s link",
        )
        for (here, there), rate in slow_pairs(found).items()
    ]
    return lines("bandwidth", slow, f"{low} to {high} in each direction")
