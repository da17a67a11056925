"""What is refused of options of privacy."""

from typing import Any

import pytest

import jgraph as jg
from jgraph.errors import ConfigError

PRIVATE: dict[str, Any] = {"noise_multiplier": 1.0, "clip": 1.0, "delta": 1e-5}


@pytest.mark.bad_input_row(31)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": None}, "delta=…"),
        ({"delta": 1.0}, "delta=1.0"),
        ({"delta": 0}, "delta=0"),
        ({"noise_multiplier": 0.0}, "noise_multiplier=0.0"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier=nan"),
        ({"noise_multiplier": "1"}, "noise_multiplier='1'"),
        ({"clip": -1.0}, "clip=-1.0"),
        ({"clip": True}, "clip=True"),
        ({"target_epsilon": 0.0}, "target_epsilon=0.0"),
        ({"unit": "user"}, "unit='user'"),
        ({"examples_at_once": 0}, "examples_at_once=0"),
    ],
)
def test_an_option_that_means_nothing_is_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        jg.Privacy(**{**PRIVATE, **options})
    assert message in str(error.value)


@pytest.mark.bad_input_row(31)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"backup_workers": 1}, "backup_workers=1"),
        ({"replicas_to_aggregate": 1}, "replicas_to_aggregate=1"),
        ({"elastic": jg.Elastic()}, "elastic=Elastic"),
        ({"gradient_dtype": "int8"}, "gradient_dtype='int8'"),
        ({"dense": "workers"}, "dense='workers'"),
        ({"durability": "log"}, "durability='log'"),
        ({"durability": "replica"}, "durability='replica'"),
    ],
)
def test_what_no_accountant_knows_is_refused(
    options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as error:
        jg.SyncPS(privacy=jg.Privacy(**PRIVATE), **options)
    assert named in str(error.value)


def test_rounds_refuse_the_same_in_their_own_name() -> None:
    with pytest.raises(ConfigError, match=r"LocalSGD\(privacy=…\) with dense="):
        jg.LocalSGD(privacy=jg.Privacy(unit="client", **PRIVATE), dense="workers")


def test_a_strategy_names_the_unit_that_it_hides() -> None:
    with pytest.raises(ConfigError, match="LocalSGD hides the part of one client"):
        jg.LocalSGD(privacy=jg.Privacy(**PRIVATE))
    for strategy in (jg.SyncPS, jg.Local):
        with pytest.raises(ConfigError, match="hides the part of one example"):
            strategy(privacy=jg.Privacy(unit="client", **PRIVATE))
    with pytest.raises(ConfigError, match=r"takes jg.Privacy\(noise_multiplier="):
        jg.Local(privacy=1.0)  # type: ignore[arg-type]
