"""The line of packets that tests of faults put between hosts."""

from tests.support.lossy import LossyLine


def test_what_is_sent_arrives_later_and_in_its_order() -> None:
    line = LossyLine(seed=1)
    line.delay_s = 0.3
    line.send(b"a", now=0.0)
    line.send(b"b", now=0.1)
    assert line.next_in_s(now=0.1) == 0.3 - 0.1
    assert line.arrived(now=0.29) == []
    assert line.arrived(now=0.5) == [b"a", b"b"]
    assert line.next_in_s(now=0.5) is None


def test_what_is_sent_when_it_is_fast_again_overtakes_nothing() -> None:
    line = LossyLine(seed=1)
    line.delay_s = 0.3
    line.send(b"slow", now=0.0)
    line.delay_s = 0.0
    line.send(b"fast", now=0.1)
    assert line.arrived(now=0.2) == []
    assert line.arrived(now=0.3) == [b"slow", b"fast"]


def test_a_part_is_lost_and_the_same_part_for_the_same_seed() -> None:
    def lost(seed: int) -> list[int]:
        line = LossyLine(seed)
        line.loss = 0.05
        for number in range(1000):
            line.send(number.to_bytes(2), now=0.0)
        there = [int.from_bytes(packet) for packet in line.arrived(now=0.0)]
        gone = sorted(set(range(1000)) - set(there))
        assert (there, len(gone)) == (sorted(there), line.lost)
        return gone

    assert lost(1) == lost(1) != lost(2)
    assert 25 < len(lost(1)) < 75
