#!/usr/bin/env python3
"""From a process's death to its survivors' release, and to their next good allreduce.

Scenarios (each in a fresh round with a fresh victim; the survivors stay):
  running   SIGKILL while all ranks exchange one allreduce after the other
  blocked   SIGKILL while the survivors wait in an allreduce that the victim has not entered
  frozen    SIGSTOP, with a heartbeat limit of 0.3 s
  elastic   as `running`, but nobody is told who is left: the members agree on it
  spare     as `elastic`, in a job that is full: a process that waits takes the dead one's place
  gloo      as `running`, with gloo and a timeout of 5 s: destroy and init instead of configure()
  torchft   as `running`, but members are decided by torchft's Manager and its lighthouse (limit of
            a heartbeat: 1 s), over torchft's own gloo group with a timeout of 5 s
  torchft-ft  as `torchft`, over this package's ProcessGroupHost

The last two need torchft, and processes that share one host; without they are left out.

Each in every --world and with every --resident: the kernel frees a dead process's memory before it
closes its ordinary sockets. With --netns (root) the victim has a host of its own: a network
namespace, reached over a veth pair. The clock is CLOCK_MONOTONIC, which all namespaces and
processes of a host share; it starts just before the signal. But for `elastic`, who belongs to the
next generation is decided by the caller; here everyone knows the victim beforehand, so that no
launcher stands between the error and configure(). What `elastic` takes longer is the price of the
agreement.

Each recovery is told apart: detect (the first survivor is released), release (the last one is); and
of the latter agree, connect (configure(); gloo: destroy and init), tables (torch's), allreduce (the
first good one); and, after that, sync: 4 MiB of state that nobody lacks are compared by hashes.
With `spare` the sync comes before the allreduce, which the spare takes part in. With `torchft`
agree is all that comes before the group's configure(): the refused commit and the next quorum.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import bench_ranks as ranks
import bench_report as report
from bench_hosts import NoSecondHost, SecondHost
from bench_managers import ManagedJob, Struck, is_installed
from bench_recovery_ranks import Message, MonitorState, rank_main

HEARTBEAT_S = 0.3
SPARE_SETTLES_S = 1.0  # until members know that it waits
PHASES = ("detect", "release", "agree", "connect", "tables", "allreduce", "sync")
MANAGED = {"torchft": "torchft.Gloo", "torchft-ft": "Host"}  # group, under torchft's Manager
IN_PICTURES = {"torchft": "torchft over its gloo", "torchft-ft": "torchft over ft"}
SCENARIOS = ("running", "elastic", "spare", "blocked", "frozen", "gloo", *MANAGED)
NAMES_NO_CAUSE = ("gloo", "torchft")
# The project's aims: (time, statistic, seconds).
KILLED = [
    ("last_released_s", "median", 0.005),
    ("last_released_s", "p99", 0.010),
    ("last_good_s", "median", 0.030),
]
BOUNDS: dict[str, list[tuple[str, str, float]]] = {
    "running": KILLED,
    "blocked": KILLED,
    "frozen": [("last_released_s", "max", HEARTBEAT_S + 0.1)],
    "elastic": KILLED,
    "spare": [("last_good_s", "median", 0.100)],
    "gloo": [],
    **{name: [] for name in MANAGED},
}


@dataclass(frozen=True)
class Setting:
    """A scenario, in a world of so many, with a victim that holds so many resident bytes."""

    scenario: str
    world: int
    resident: int

    def __str__(self) -> str:
        """As in the table and the picture."""
        return f"{self.scenario}, {self.world} ranks, {report.format_bytes(self.resident)}"


class Scenario:
    """The rounds of one setting, in one pool of processes."""

    def __init__(self, setting: Setting, pool: ranks.Pool, arguments: argparse.Namespace) -> None:
        self._name = setting.scenario
        self._setting = setting
        self._pool = pool
        self._arguments = arguments
        self._chance = random.Random(arguments.seed)
        self._survivors: list[ranks.RankProcess] = []
        self._replacement: tuple[list[ranks.RankProcess], list[Message]] | None = None

    def run(self, kills: int) -> list[Message]:
        self._survivors, _ = self._start(self._setting.world - 1, 0)
        rounds = []
        for number in range(kills):
            ranks.progress(f"{self._setting}: {number + 1} of {kills}")
            rounds.append(self._round(number))
        spares = [] if self._replacement is None else self._replacement[0]
        self._pool.finish([*self._survivors, *spares])
        return rounds

    def _start(self, count: int, resident: int) -> tuple[list[ranks.RankProcess], list[Message]]:
        processes = self._pool.start(count, elsewhere=resident > 0)
        engine = {"gloo": "gloo", "elastic": "elastic", "spare": "elastic"}.get(self._name, "ft")
        world = self._setting.world
        most = world if self._name == "spare" else 2 * world
        told = {"address": self._pool.address, "founders": world - 1, "most": most}
        for process in processes:
            process.send("start", engine=engine, resident=resident, **told)
        return processes, self._pool.gather(processes, "started", 120)

    def _round(self, number: int) -> Message:
        [victim], [answer] = self._replacement or self._start(1, self._setting.resident)
        newcomer = self._setting.world - 1  # the rank of who came last, in a view
        place = newcomer if self._agrees() else self._chance.randrange(newcomer + 1)
        members = [*self._survivors[:place], victim, *self._survivors[place:]]
        for rank, process in enumerate(members):
            process.send(
                "round",
                prefix=f"round{number}",
                rank=rank,
                size=len(members),
                victim=place,
                bytes=self._arguments.size,
                blocked=self._name == "blocked",
                replaced=self._name == "spare",
            )
        self._pool.gather(members, "busy", 60)
        awaited = [*self._survivors, *self._await_spare()]
        time.sleep(self._chance.uniform(0.05, 0.15))
        killed = victim.signal(signal.SIGSTOP if self._name == "frozen" else signal.SIGKILL)
        answers = self._pool.gather(awaited, "recovered", 60)
        self._pool.drop(victim)
        return evaluate(killed, place, answer["resident"], answers)

    def _agrees(self) -> bool:
        return self._name in ("elastic", "spare")

    def _await_spare(self) -> list[ranks.RankProcess]:
        """In that scenario: start one, which waits in recover(), and is the next round's victim."""
        if self._name != "spare":
            return []
        self._replacement = self._start(1, self._setting.resident)
        [spare] = self._replacement[0]
        spare.send("spare", size=self._setting.world)
        time.sleep(SPARE_SETTLES_S)
        return [spare]


class ManagedScenario:
    """The rounds of one setting, in one job under torchft's Managers."""

    def __init__(self, setting: Setting, pool: ranks.Pool, arguments: argparse.Namespace) -> None:
        self._setting = setting
        self._pool = pool
        self._size = arguments.size
        self._chance = random.Random(arguments.seed)

    def run(self, kills: int) -> list[Message]:
        """Fewer rounds than that where the survivors do not commit any more."""
        setting = self._setting
        rounds: list[Message] = []
        with ManagedJob(
            self._pool,
            MANAGED[setting.scenario],
            setting.world,
            kills,
            size=self._size,
            resident=setting.resident,
            endless=True,
        ) as job:
            for number in range(kills):
                ranks.progress(f"{setting}: {number + 1} of {kills}")
                try:
                    struck = job.strike(signal.SIGKILL, self._chance.uniform(0.05, 0.15))
                except ranks.RankFailed as failure:
                    if not rounds:
                        raise
                    ranks.progress(f"{setting} ends with kill {number + 1}: {failure}")
                    break
                rounds.append(evaluate_struck(struck))
        return rounds


def evaluate_struck(struck: Struck) -> Message:
    """As of any other scenario, of a job whose replicas tell of their Manager's steps."""
    answers = [
        {
            **{name: told[name] for name in ("error", "cause_rank", "text", "configured")},
            "released": told["failed"],
            "began": told["configured"],
            "good": told["summed"],
            "monitor": None,
            "phases": {
                "agree": told["asked"] - told["failed"],
                "connect": told["configured"] - told["asked"],
            },
        }
        for told in struck.answers
    ]
    return evaluate(struck.when, struck.victim["rank"], struck.victim["resident"], answers)


def evaluate(killed: float, place: int, resident: int, answers: list[Message]) -> Message:
    """One round's figures, from what the survivors (and the spare) tell of it."""
    survived = [a for a in answers if "released" in a]
    released = [a["released"] for a in survived]
    return {
        "victim_rank": place,
        "victim_resident_bytes": resident,
        "first_released_s": min(released) - killed,
        "last_released_s": max(released) - killed,
        "last_good_s": max(a["good"] for a in answers) - killed,
        "configure_s": max(a["configured"] - a["released"] for a in survived),
        "errors": sorted({a["error"] for a in survived}),
        "cause_named_by_all": all(a["cause_rank"] == place for a in survived),
        "monitor": common_state([a["monitor"] for a in answers]),
        "phases_s": phases_of(killed, survived),
        "example": survived[0]["text"],
    }


def phases_of(killed: float, answers: list[Message]) -> dict[str, float]:
    """How long each part of one recovery took, in seconds: until the first and the last survivor
    was released, and from there the parts of the latter, which waits for nobody.
    """
    first = min(a["released"] for a in answers)
    last = max(answers, key=lambda a: a["released"])
    known = {
        **last["phases"],
        "detect": first - killed,
        "release": last["released"] - first,
        "allreduce": last["good"] - last["began"],
    }
    known.setdefault("connect", last["configured"] - last["released"])
    return {name: known[name] for name in PHASES if name in known}


def common_state(monitors: list[MonitorState | None]) -> MonitorState | None:
    """What holds for the peer monitors of all; None where a rank has none."""
    all_of_them = [monitor for monitor in monitors if monitor is not None]
    if len(all_of_them) < len(monitors):
        return None
    return {name: all(monitor[name] for monitor in all_of_them) for name in all_of_them[0]}


def run_setting(
    setting: Setting, arguments: argparse.Namespace, second: SecondHost | None
) -> Message:
    kills = kills_of(setting.scenario, arguments)
    kind = ManagedScenario if setting.scenario in MANAGED else Scenario
    frozen = setting.scenario == "frozen"
    heartbeat = {"TORCHFT_EXT_HEARTBEAT": str(HEARTBEAT_S)} if frozen else {}
    with ranks.Pool(__file__, heartbeat, second) as pool:
        rounds = kind(setting, pool, arguments).run(kills)
    times = ("first_released_s", "last_released_s", "configure_s", "last_good_s")
    summary = {key: report.summary([r[key] for r in rounds]) for key in times}
    return {
        **asdict(setting),
        "second_host": second is not None,
        "summary": summary,
        "missed": missed_bounds(setting.scenario, summary),
        "monitor": common_state([r["monitor"] for r in rounds]),
        "causes_named": sum(r["cause_named_by_all"] for r in rounds),
        "rounds": rounds,
    }


def kills_of(scenario: str, arguments: argparse.Namespace) -> int:
    if scenario in MANAGED:
        return int(arguments.torchft_kills)
    return int(arguments.gloo_kills if scenario == "gloo" else arguments.kills)


def missed_bounds(scenario: str, summary: dict[str, dict[str, float]]) -> list[str]:
    """Which of the project's aims the times miss, each in words."""
    return [
        f"{name} {kind} {summary[name][kind] * 1e3:.1f} ms, wanted {limit * 1e3:g} ms"
        for name, kind, limit in BOUNDS[scenario]
        if summary[name][kind] > limit
    ]


def print_results(results: list[Message]) -> None:
    rows = []
    for r in results:
        released, good = r["summary"]["last_released_s"], r["summary"]["last_good_s"]
        cells = [report.format_ms(s[k]) for s in (released, good) for k in ("median", "p99", "max")]
        errors = ",".join(sorted({e for one in r["rounds"] for e in one["errors"]}))
        named = (
            "-" if r["scenario"] in NAMES_NO_CAUSE else f"{r['causes_named']}/{released['count']}"
        )
        place = [r["scenario"], str(r["world"]), report.format_bytes(r["resident"])]
        rows.append([*place, str(released["count"]), *cells, named, errors])
    times = ["released ms", "p99", "max", "next good ms", "p99", "max"]
    head = ["scenario", "ranks", "resident", "n", *times, "cause named", "errors"]
    print(
        "From the signal to the last survivor's release, and to the next good allreduce on all:\n"
    )
    report.print_table(head, rows)
    print_phases(results)
    print_price_of_agreement(results)
    for r in results:
        for missed in r["missed"]:
            setting = Setting(r["scenario"], r["world"], r["resident"])
            print(f"aim missed: {setting}: {missed}")


def print_price_of_agreement(results: list[Message]) -> None:
    """What `elastic` takes longer than `running`, per world, in medians."""
    good = {(r["scenario"], r["world"]): r["summary"]["last_good_s"]["median"] for r in results}
    for scenario, world in good:
        if scenario == "elastic" and ("running", world) in good:
            added = good[scenario, world] - good["running", world]
            print(f"The agreement adds {report.format_ms(added)} ms to the median, {world} ranks.")


def median_phases(result: Message) -> dict[str, float]:
    """In milliseconds; each phase by itself, so that they need not add up to the median."""
    rounds = [one["phases_s"] for one in result["rounds"]]
    return {name: report.percentile([one[name] for one in rounds], 50) * 1e3 for name in rounds[0]}


def print_phases(results: list[Message]) -> None:
    """The parts of a recovery; a table that documents can take as it is."""
    rows = []
    for r in results:
        medians = median_phases(r)
        cells = [f"{medians[name]:.2f}" if name in medians else "-" for name in PHASES]
        rows.append([r["scenario"], str(r["world"]), *cells])
    print("\nMedians of the parts, in ms:\n")
    report.print_table(["scenario", "ranks", *PHASES], rows)
    print(f"\n| {' | '.join(['ms', *PHASES])} |\n|{'---|' * (len(PHASES) + 1)}")
    for scenario, world, *cells in rows:
        print(f"| {scenario}, {world} ranks | {' | '.join(cells)} |")


def names_in_pictures(results: list[Message]) -> list[str]:
    """Of the rows; the victims' memory where it differs."""
    names = [
        f"{IN_PICTURES.get(r['scenario'], r['scenario'])}, {r['world']} ranks" for r in results
    ]
    if len({r["resident"] for r in results}) == 1:
        return names
    sizes = [report.format_bytes(r["resident"]) for r in results]
    return [f"{name}, {size}" for name, size in zip(names, sizes, strict=True)]


def draw(results: list[Message], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.6 * len(results)), layout="constrained")
    kinds: list[tuple[str, str, str, float]] = [
        ("last_released_s", "last survivor released", "tab:blue", -0.15),
        ("last_good_s", "next good allreduce on all survivors", "tab:orange", 0.15),
    ]
    for key, label, colour, shift in kinds:
        for row, result in enumerate(results):
            values = [r[key] * 1e3 for r in result["rounds"]]
            axes.plot(
                values,
                [row + shift] * len(values),
                "o",
                color=colour,
                alpha=0.4,
                ms=5,
                mew=0,
                label=label if row == 0 else None,
            )
            axes.plot(report.percentile(values, 50), row + shift, "|", color=colour, ms=18, mew=2)
    largest = max(r["last_good_s"] for result in results for r in result["rounds"]) * 1e3
    axes.set_xscale("log")
    axes.set_xlim(0.3, max(100.0, 2 * largest))
    axes.set_ylim(-0.5, len(results) - 0.5)
    axes.set_xlabel("ms after the signal (bar: median)")
    names = names_in_pictures(results)
    axes.set_yticks(range(len(results)), names)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    where = ", on a host of its own" if results[0]["second_host"] else ""
    axes.set_title(f"A process dies{where}")
    axes.legend(loc="best")
    figure.savefig(path, dpi=120)
    print(f"written: {path}")


def cut_of_bars(results: list[Message]) -> float:
    """Where bars end, in ms: torchft's seconds would leave nothing to see of the others."""
    totals = {id(r): sum(median_phases(r).values()) for r in results}
    others = [totals[id(r)] for r in results if r["scenario"] not in MANAGED]
    return 1.5 * max(others) if others else max(totals.values())


def draw_phases(results: list[Message], path: Path) -> None:
    """Bars from the signal to the first good allreduce, by phase; sync comes after it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.4 + 0.5 * len(results)), layout="constrained")
    colours = {name: f"C{number}" for number, name in enumerate(PHASES)}
    cut = cut_of_bars(results)
    for row, result in enumerate(results):
        left = 0.0
        for name, width in median_phases(result).items():
            shown = max(0.0, min(width, cut - left))
            axes.barh(row, shown, left=min(left, cut), color=colours[name], height=0.6)
            left += width
        told = f"{left:.1f}" if left <= cut else f"... {left:,.0f}"
        axes.text(min(left, cut), row, f" {told}", va="center")
    for name in PHASES:
        axes.barh(0, 0, color=colours[name], label=name)
    names = names_in_pictures(results)
    axes.set_yticks(range(len(results)), names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("ms after the signal, medians of each part")
    axes.set_title("A process dies: the parts of the recovery")
    axes.legend(loc="best", ncols=2)
    figure.savefig(path, dpi=120)
    print(f"written: {path}")


def parse_arguments() -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="3 kills per scenario")
    parse = report.parse_bytes
    sizes = report.comma_list(int)
    parser.add_argument("--world", type=sizes, default=[4], help="default 4; a list: 4,8")
    parser.add_argument("--kills", type=int, help="per scenario; default 50")
    parser.add_argument("--gloo-kills", type=int, default=1, help="default 1; each takes 5 s")
    parser.add_argument(
        "--torchft-kills", type=int, default=1, help="default 1; each takes up to 7 s"
    )
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="default %(default)s")
    parser.add_argument(
        "--size", type=parse, default=4 * 2**20, help="of the allreduces; default 4M"
    )
    parser.add_argument(
        "--resident",
        type=report.comma_list(parse),
        default=[250 * 2**20],
        help="the victim's; default 250M; a list: 250M,4G",
    )
    parser.add_argument(
        "--netns", action="store_true", help="the victim on a host of its own; needs root and ip"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw all rounds there (PNG or SVG)"
    )
    parser.add_argument(
        "--phases-picture", type=Path, metavar="FILE", help="draw the parts there (PNG or SVG)"
    )
    parser.add_argument("--check", action="store_true", help="exit status 1 where an aim is missed")
    arguments = parser.parse_args()
    arguments.kills = arguments.kills or (3 if arguments.quick else 50)
    unknown = set(arguments.scenarios.split(",")) - set(SCENARIOS)
    if unknown or min(arguments.world) < 2:
        parser.error(
            f"unknown scenarios: {sorted(unknown)}" if unknown else "--world must be at least 2"
        )
    return arguments


def measured_scenarios(arguments: argparse.Namespace) -> list[str]:
    """Those that were asked for, and that can be measured here."""
    names = arguments.scenarios.split(",")
    managed = [name for name in names if name in MANAGED]
    if managed and (arguments.netns or not is_installed()):
        why = "they share one host" if arguments.netns else "torchft is not installed"
        print(f"left out: {', '.join(managed)}: {why}")
        names = [name for name in names if name not in MANAGED]
    return [name for name in names if kills_of(name, arguments) > 0]


def main() -> int:
    arguments = parse_arguments()
    if arguments.rank_process:
        rank_main()
        return 0
    run = report.describe_run(arguments)
    names = measured_scenarios(arguments)
    settings = [
        Setting(name, world, resident)
        for world in arguments.world
        for resident in arguments.resident
        for name in names
    ]
    if not settings:
        sys.exit("nothing is left to measure")
    results: list[Message] = []
    with SecondHost() if arguments.netns else nullcontext() as second:
        for setting in settings:  # what is measured is written, whatever comes after it
            results.append(run_setting(setting, arguments, second))
            report.write_json(arguments.json, {"benchmark": "recovery", **run, "results": results})
    report.print_machine(run)
    print_results(results)
    if arguments.picture is not None:
        draw(results, arguments.picture)
    if arguments.phases_picture is not None:
        draw_phases(results, arguments.phases_picture)
    return 1 if arguments.check and any(result["missed"] for result in results) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NoSecondHost as error:
        sys.exit(f"--netns: {error}")
