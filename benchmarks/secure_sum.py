"""A secure sum of 50 members, of whom a tenth goes away under masks.

Run: ``python -m benchmarks.secure_sum``. All members are in this process, one after the
other. Prints a JSON line per round: seconds of one member for all that it does, of who
sums for adding a contribution, and for taking the masks off; and whether the sum is
that of the plain values, bit by bit. ``--rows`` prints the median of three rounds.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import measure
from jgraph.coordination.secure.sum_round import (
    AskShares,
    Came,
    Instruction,
    PassKeys,
    PassShares,
    SumRound,
    TimeIsUp,
    Unmask,
)
from jgraph.rpc.security.secure_sum import MaskedSum, SumMember

MEMBERS, NEIGHBOURS, THRESHOLD = 50, 10, 7
NBYTES, DROPS, ROUNDS = 4 << 20, 0.1, 3


def one_round(number: int, members: int, nbytes: int) -> dict[str, Any]:
    names = [f"m{n:03}" for n in range(members)]
    there = {name: SumMember(name, threshold=THRESHOLD) for name in names}
    rng = np.random.default_rng(number)
    values = {n: rng.integers(0, 1 << 20, nbytes // 4, np.uint32) for n in names}
    stays = names[: members - round(DROPS * members)]
    sums = SumRound(
        names, neighbours=NEIGHBOURS, threshold=THRESHOLD, least=2, seed=number
    )
    total = MaskedSum(number, threshold=THRESHOLD)
    boxes: dict[str, dict[str, bytes]] = {name: {} for name in names}
    seconds = {"member": 0.0, "add": 0.0, "unmask": 0.0}
    told: list[Instruction] = []

    def timed(part: str, begin: float) -> None:
        seconds[part] += time.perf_counter() - begin

    def came(step: Any, who: list[str]) -> None:
        told[:] = [i for name in who for i in sums.handle(Came(step, name))]
        told.extend(sums.handle(TimeIsUp(step)))

    for name in names:
        begin = time.perf_counter()
        total.keys[name] = there[name].begin(number)
        timed("member", begin)
    came("keys", names)
    for one in [i for i in told if isinstance(i, PassKeys)]:
        begin = time.perf_counter()
        keys = {peer: total.keys[peer] for peer in one.neighbours}
        sealed = there[one.member].share(number, keys)
        timed("member", begin)
        for peer, share in sealed.items():
            boxes[peer][one.member] = share
    came("exchange", names)
    for got in [i for i in told if isinstance(i, PassShares) and i.member in stays]:
        begin = time.perf_counter()
        box = {sender: boxes[got.member][sender] for sender in got.senders}
        masked = there[got.member].mask(number, box, values[got.member])
        timed("member", begin)
        begin = time.perf_counter()
        total.add(masked)
        timed("add", begin)
    came("masked", stays)
    for ask in [i for i in told if isinstance(i, AskShares)]:
        begin = time.perf_counter()
        answer = there[ask.member].reveal(number, ask.inside, ask.outside)
        timed("member", begin)
        total.tell(ask.member, answer)
    came("reveal", stays)
    (last,) = [i for i in told if isinstance(i, Unmask)]
    begin = time.perf_counter()
    found = total.unmasked(last.inside, last.outside, sums.neighbours)
    timed("unmask", begin)
    due = np.zeros_like(found)
    for name in last.inside:
        due += values[name]
    return {
        "members": members,
        "in the sum": len(last.inside),
        "MB": nbytes / 1e6,
        "member_s": round(seconds["member"] / members, 4),
        "add_s": round(seconds["add"], 4),
        "unmask_s": round(seconds["unmask"], 4),
        "exact": bool((found == due).all()),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=MEMBERS)
    parser.add_argument("--nbytes", type=int, default=NBYTES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--rows", action="store_true", help="rows of a table")
    args = parser.parse_args(words)
    lines = [
        one_round(number, args.members, args.nbytes)
        for number in range(1, args.rounds + 1)
    ]
    if not args.rows:
        for line in lines:
            measure.emit("secure_sum", **line)
        return
    assert all(line["exact"] for line in lines)
    each = [line["member_s"] for line in lines]
    value = round(statistics.median(each), 4)
    measure.emit_row(1, value, "s of a member and round")


if __name__ == "__main__":
    main()
