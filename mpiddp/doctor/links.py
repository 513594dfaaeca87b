"""From what the pairs of hosts say to lines: pure functions, as in `compare`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

from mpiddp.doctor.compare import Facts, differences
from mpiddp.doctor.report import FAIL, UNKNOWN, WARN, Found, Line, lines
from mpiddp.text import all_of, counted, size_text

Pair = Mapping[str, float]  # "rate" in bytes a second, and "latency_ms"

_LATE, _LATE_MS = 5.0, 1.0  # times the middle round trip, and more than it by as much
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
        if each["address"] == addresses[name] and each["mtu"]
    }
    if not values:
        return [Line("network", UNKNOWN, "no host told the MTU of its interface")]
    mend = "ip link set dev INTERFACE mtu N, alike on the hosts and the switch"
    fact = differences("the MTU", values)
    return lines("network", [(WARN, fact, mend)] if fact else [], f"MTU {max(values.values())}")


def reach(
    found: Mapping[str, Mapping[str, Any]], addresses: Mapping[str, str], facts: Facts
) -> list[Line]:
    """Whether each host reaches each other on the job's network, in each direction, with large packets."""
    taken = {here: {answer["source"] for answer in each.values()} for here, each in found.items()}
    over = {
        each["name"]
        for here, sources in taken.items()
        for each in facts[here]["interfaces"]
        if each["address"] in sources
    }
    count = sum(len(each) for each in found.values())
    if not count:
        return [Line("network", UNKNOWN, "no direction between the hosts was tried")]
    return lines("network", _reach(found, addresses), f"all {count} directions open{_over(over)}")


def _over(interfaces: Collection[str]) -> str:
    return f", over {all_of(sorted(interfaces))}" if interfaces else ""


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


def ports(
    found: Mapping[str, Mapping[str, Any]], listening: Mapping[str, Mapping[str, Any]], facts: Facts
) -> list[Line]:
    """Whether the ports of the ranks are open: of torch's store, the job channel, gloo, NCCL and MPI.

    Each takes any port that the kernel gives it, so several of that range were tried, and MASTER_PORT.
    """
    ranges = {tuple(facts[name]["ports"]) for name in listening if facts[name]["ports"]}
    text = all_of([f"{first} to {last}" for first, last in sorted(ranges)]) or "unknown"
    tried = max((len(each["ports"]) for each in listening.values()), default=0)
    well = f"{counted(tried, 'port')} tried in each direction, among them of {text}"
    rows = [*_ports(found, listening, text)]
    if all(answer["error"] for each in found.values() for answer in each.values()):
        rows.append((UNKNOWN, "no port was tried: no direction between the hosts is open", ""))
    return lines("ports", rows, well)


def _ports(
    found: Mapping[str, Mapping[str, Any]],
    listening: Mapping[str, Mapping[str, Any]],
    ranges: str,
) -> Iterator[Found]:
    for name, each in listening.items():
        if each["busy"]:
            fact = f"MASTER_PORT cannot be had on {name}: {each['busy']}"
            yield WARN, fact, f"leave MASTER_PORT unset, or see: ssh {name} ss -ltnp"
    for here, answers in found.items():
        for there, answer in answers.items():
            closed = {} if answer["error"] else answer["closed"]
            if closed:
                (error, *_) = closed.values()
                numbers = all_of(sorted(closed, key=int))
                fact = f"{here} → {there} fails at {numbers}, and not at other ports: {error}"
                yield FAIL, fact, f"allow TCP from {here} on {there} at all of {ranges}"


def second_networks(
    found: Mapping[str, Mapping[str, Mapping[str, Any]]], job: Collection[str]
) -> list[Line]:
    """Whether each network besides the job's carries anything. `found`: by network, as for `reach`."""
    rows: list[Found] = []
    for network, answers in found.items():
        errors = [answer["error"] for each in answers.values() for answer in each.values()]
        if not errors:
            rows.append((UNKNOWN, f"the network {network} was not tried", ""))
        elif all(errors):
            fact = f"the network {network} connects no two hosts: {errors[0]}"
            mend = f"see its cable and switch, or take it down; the job takes {all_of(sorted(job))}"
            rows.append((WARN, fact, mend))
    return lines("network", rows, f"{counted(len(found), 'other network')} can be used")


def slow_pairs(found: Mapping[tuple[str, str], Pair]) -> list[tuple[str, str]]:
    """The directions that carry less than half of the middle one, or are late."""
    return [*_slow(found), *_late(found)]


def _slow(found: Mapping[tuple[str, str], Pair]) -> list[tuple[str, str]]:
    usual = median(each["rate"] for each in found.values()) if found else 0.0
    return [pair for pair, each in found.items() if each["rate"] < usual / 2]


def _late(found: Mapping[tuple[str, str], Pair]) -> list[tuple[str, str]]:
    usual = median(each["latency_ms"] for each in found.values()) if found else 0.0
    most = max(_LATE * usual, usual + _LATE_MS)
    return [pair for pair, each in found.items() if each["latency_ms"] > most]


def rates(found: Mapping[tuple[str, str], Pair]) -> list[Line]:
    """The bytes a second and the round trip of each direction; the slow ones against the others."""
    if not found:
        return []
    values = [each["rate"] for each in found.values()]
    low, usual, high = (f"{size_text(f(values))}/s" for f in (min, median, max))
    slow = [
        (
            WARN,
            f"{here} → {there} carries {size_text(found[here, there]['rate'])}/s, the middle pair {usual}",
            f"see the cable and the port: ssh {here} ip -s link",
        )
        for here, there in _slow(found)
    ]
    times = [each["latency_ms"] for each in found.values()]
    late = [
        (
            WARN,
            f"{here} → {there} and back takes {found[here, there]['latency_ms']:.2f} ms, "
            f"the middle pair {median(times):.2f} ms",
            f"see: ssh {here} ping -c 5 {there}",
        )
        for here, there in _late(found)
    ]
    return [
        *lines("bandwidth", slow, f"{low} to {high} in each direction"),
        *lines("latency", late, f"{min(times):.2f} to {max(times):.2f} ms for a round trip"),
    ]


def of_host(found: Mapping[tuple[str, str], Pair], name: str) -> float | None:
    """The bytes a second that a host carries, sent and received: the middle of its directions."""
    own = [each["rate"] for pair, each in found.items() if name in pair]
    return median(own) if own else None
