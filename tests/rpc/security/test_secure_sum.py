"""Secure sums: exact above the threshold, nothing below it, no secret told twice."""

import hashlib
import hmac
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jgraph.coordination.secure.shamir import PRIME, recovered, shares
from jgraph.errors import SecureSumError
from jgraph.rpc.security.masks import KeyPair, add_words, derived, seal, unseal
from jgraph.rpc.security.secure_sum import SumMember, Told
from tests.support.secure_sums import Outcome, summed

pytestmark = pytest.mark.usefixtures("nothing_is_left")

COUNT = 5
STEPS = ("keys", "exchange", "masked", "reveal")


def entropy(seed: int) -> Callable[[int], bytes]:
    """Random bytes of a test: each call others, each run the same."""
    state = [seed.to_bytes(8, "big")]

    def draw(count: int) -> bytes:
        state[0] = hashlib.sha256(state[0]).digest()
        return hashlib.shake_256(state[0]).digest(count)

    return draw


def words(key: bytes, count: int) -> Any:
    values = np.zeros(count, np.uint32)
    add_words(values, key)
    return values


def members(count: int, threshold: int) -> dict[str, SumMember]:
    return {
        f"m{n:02}": SumMember(f"m{n:02}", threshold=threshold, entropy=entropy(n))
        for n in range(count)
    }


def values_of(names: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, 2**32, COUNT, np.uint32) for name in sorted(names)}


def plain_sum(values: dict[str, Any], inside: Any) -> Any:
    total = np.zeros(COUNT, np.uint32)
    for name in inside:
        total += values[name]
    return total


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(3, 9),
    near=st.sampled_from([2, 4, 6]),
    gone=st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, 8)), max_size=6, unique=True
    ),
    seed=st.integers(0, 99),
)
def test_a_sum_is_exact_or_there_is_none(
    count: int, near: int, gone: list[tuple[str, int]], seed: int
) -> None:
    threshold = min(near, count - 1) * 2 // 3 + 1
    there = members(count, threshold)
    values = values_of(there)
    leaves: Any = {step: {f"m{n:02}" for s, n in gone if s == step} for step in STEPS}
    out = summed(there, values, leaves, neighbours=near, threshold=threshold, seed=seed)
    away = set[str]().union(*(leaves[step] for step in STEPS[:3]))
    if out.total is None:
        assert out.reason.startswith("the round is void")
        assert out.inside == ()
    else:
        # All who contributed are in it, and nobody else.
        assert set(out.inside) == set(out.seen) >= set(there) - away - {""}
        np.testing.assert_array_equal(out.total, plain_sum(values, out.inside))
    no_secret_is_known_twice(out)


def no_secret_is_known_twice(out: Outcome) -> None:
    """Of each member who sums has shares of one kind at most."""
    seeds = {owner for told in out.told.values() for owner in told.seeds}
    keys = {owner for told in out.told.values() for owner in told.keys}
    assert not seeds & keys


def test_below_the_threshold_nobody_is_asked_for_a_share() -> None:
    there = members(6, 4)
    values = values_of(there)
    gone: Any = {"masked": ["m00", "m01"]}
    out = summed(there, values, gone, neighbours=6, threshold=4)
    assert out.total is None
    assert "too few neighbours of" in out.reason
    assert out.told == {}


def test_what_who_sums_sees_is_no_value_and_no_difference_of_two() -> None:
    there = members(5, 3)
    zeros = {name: np.zeros(1000, np.uint32) for name in there}
    out = summed(there, zeros, {}, neighbours=4, threshold=3)
    assert not np.any(out.total)
    seen = [*out.seen.values()]
    for n, one in enumerate(seen):
        for other in [np.zeros_like(one), *seen[:n]]:
            # Random words: half of their bits are set, and none is as the other's.
            bits = np.unpackbits((one - other).view(np.uint8))
            assert abs(bits.mean() - 0.5) < 0.02


@pytest.mark.row(47)
@pytest.mark.parametrize("step", STEPS)
def test_a_member_may_go_away_in_each_step(step: str) -> None:
    there = members(7, 4)
    values = values_of(there)
    gone: Any = {step: ["m03"]}
    out = summed(there, values, gone, neighbours=6, threshold=4)
    inside = set(there) - ({"m03"} if step != "reveal" else set())
    assert set(out.inside) == inside
    np.testing.assert_array_equal(out.total, plain_sum(values, inside))


@pytest.mark.row(47)
def test_a_share_that_was_changed_on_its_way_ends_the_part_of_its_receiver() -> None:
    def changed(sender: str, to: str, sealed: bytes) -> bytes:
        swap = (sender, to) == ("m01", "m02")
        return bytes([sealed[0] ^ 1]) + sealed[1:] if swap else sealed

    there = members(5, 3)
    with pytest.raises(SecureSumError, match="the shares of m01 are not those"):
        summed(there, values_of(there), {}, neighbours=4, threshold=3, changed=changed)


@pytest.mark.row(47)
def test_a_false_share_is_found_and_a_true_one_taken_in_its_place() -> None:
    def lied(member: str, told: Told) -> Told:
        seeds = dict(told.seeds)
        if member == "m01":
            seeds["m00"] = bytes(33)
        return Told(seeds, told.keys)

    there = members(6, 3)
    values = values_of(there)
    out = summed(there, values, {}, neighbours=4, threshold=3, lied=lied, least=3)
    np.testing.assert_array_equal(out.total, plain_sum(values, there))


def test_false_shares_of_too_many_are_an_error_and_no_sum() -> None:
    lied = lambda member, told: Told({owner: bytes(33) for owner in told.seeds}, {})
    there = members(5, 3)
    with pytest.raises(SecureSumError, match="do not make its secret"):
        summed(there, values_of(there), {}, neighbours=4, threshold=3, lied=lied)


@pytest.mark.row(47)
def test_both_secrets_of_a_member_are_never_told() -> None:
    there = members(4, 2)
    keys = {name: one.begin(1) for name, one in there.items()}
    names = sorted(there)
    near = {name: {n: keys[n] for n in names if n != name} for name in names}
    sent = {name: there[name].share(1, near[name]) for name in names}
    first = there["m00"]
    box = {name: sent[name]["m00"] for name in names if name != "m00"}
    first.mask(1, box, np.zeros(2, np.uint32))
    with pytest.raises(SecureSumError, match="shares of both secrets of m01"):
        first.reveal(1, ["m01", "m02", "m03"], ["m01"])
    # Its part has ended: what is asked in order afterwards is refused, too.
    with pytest.raises(SecureSumError, match="it came in step 'over'"):
        first.reveal(1, ["m01", "m02", "m03"], [])


@pytest.mark.row(47)
def test_a_round_that_has_been_is_not_made_again() -> None:
    member = SumMember("m00", threshold=2)
    member.begin(7)
    for number in (7, 6):
        with pytest.raises(SecureSumError, match=f"round {number} has been"):
            member.begin(number)
    assert member.begin(8) != member.begin(9)


def test_a_key_on_which_all_would_agree_is_refused() -> None:
    there = members(3, 2)
    keys = {name: one.begin(1) for name, one in there.items()}
    bad = type(keys["m01"])(bytes(32), keys["m01"].masking, keys["m01"].seed)
    with pytest.raises(SecureSumError, match="the key of m01 is none"):
        there["m00"].share(1, {"m01": bad, "m02": keys["m02"]})


def test_a_contribution_of_another_model_is_refused() -> None:
    there = members(4, 3)
    values = values_of(there)
    values["m02"] = np.zeros(COUNT + 1, np.uint32)
    with pytest.raises(SecureSumError, match=r"has the shape \(\d,\)"):
        summed(there, values, {}, neighbours=4, threshold=3)


@pytest.mark.parametrize("threshold", [1, 2, 5])
def test_a_secret_comes_back_from_enough_shares_and_not_from_fewer(
    threshold: int,
) -> None:
    draw = entropy(3)
    secret = draw(32)
    coefficients = [
        int.from_bytes(draw(48), "big") % PRIME for _ in range(threshold - 1)
    ]
    parts = dict(enumerate(shares(secret, coefficients, 8), 1))
    some = [*parts][-threshold:]
    assert recovered({n: parts[n] for n in some}) == secret
    if threshold > 1:
        assert recovered({n: parts[n] for n in some[1:]}) != secret


def test_the_largest_secret_is_one() -> None:
    secret = b"\xff" * 32
    parts = dict(enumerate(shares(secret, [PRIME - 1, PRIME - 2], 5), 1))
    assert recovered({n: parts[n] for n in (1, 3, 5)}) == secret


def test_keys_and_streams_are_those_of_published_vectors() -> None:
    # X25519: RFC 7748, section 6.1.
    alice, bob = (
        KeyPair(bytes.fromhex(text))
        for text in (
            "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a",
            "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb",
        )
    )
    agreed = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert alice.agreed(bob.public).hex() == bob.agreed(alice.public).hex() == agreed
    # AES-256 of zeros under a key of zeros.
    block = words(bytes(32), 4).astype("<u4").tobytes()
    assert block.hex() == "dc95c078a2408989ad48a21492842087"
    # HKDF-SHA256, RFC 5869, as it is written there.
    texts = [b"jgraph secure sum", b"pair", b"7", b"a", b"bc"]
    info = b"".join(len(text).to_bytes(4, "big") + text for text in texts)
    extracted = hmac.digest(bytes(32), bytes(range(32)), "sha256")
    expanded = hmac.digest(extracted, info + b"\x01", "sha256")
    assert derived(bytes(range(32)), "pair", 7, "a", "bc") == expanded


def test_the_protocol_makes_the_bytes_that_it_made_before() -> None:
    """Of members of other versions: what changes here needs another protocol."""
    there = members(4, 3)
    out = summed(there, values_of(there), {}, neighbours=4, threshold=3)
    text = "".join(out.seen[name].tobytes().hex() for name in sorted(out.seen))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "d169cb397d254b5c"


def test_what_is_sealed_opens_with_its_key_alone() -> None:
    key, other = derived(bytes(32), "shares", 1, "a", "b"), derived(bytes(32), "x")
    sealed = seal(key, b"share")
    assert unseal(key, sealed) == b"share"
    assert unseal(other, sealed) is None
    for place in range(len(sealed)):
        bad = bytearray(sealed)
        bad[place] ^= 1
        assert unseal(key, bytes(bad)) is None


def test_keys_of_other_purposes_are_others() -> None:
    secret = bytes(range(32))
    lists: list[tuple[object, ...]] = [
        ("pair", 1, "a", "b"),
        ("pair", 1, "ab", ""),
        ("pair", 11, "a", "b"),
    ]
    lists += [("pair", 1, "b", "a"), ("own", 1), ("shares", 1, "a", "b")]
    assert len({derived(secret, *one) for one in lists}) == len(lists)


@pytest.mark.parametrize("count", [1, 1000, 32_768, 32_769, 100_001])
def test_words_are_one_stream_however_many_there_are(count: int) -> None:
    key = derived(bytes(32), "own", 1)
    many = words(key, 100_001)
    np.testing.assert_array_equal(words(key, count), many[:count])
    assert len(set(many.tolist())) > 99_900
    add_words(many, key, takes_away=True)
    assert not many.any()
