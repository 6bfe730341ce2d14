"""An attacker of another user on rank 0's host, against the ranks of a step of Slurm.

The port of rank 0 follows from the step's name, so he knows it.
"""

from __future__ import annotations

import pytest
from launched_jobs import (
    Launch,
    by_srun,
    check_a_flood,
    check_that_a_lost_port_is_told,
    check_that_both_refuse,
    check_that_changes_are_found,
    check_that_he_changes_an_object,
)
from slurm_cluster import Cluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture
def launch(cluster: Cluster) -> Launch:
    return by_srun(cluster)


@pytest.mark.parametrize("settings", ["default", "encrypted"])
def test_he_takes_the_port_of_rank_0(launch: Launch, settings: str) -> None:
    """Both ranks refuse his relay."""
    check_that_both_refuse(launch, settings)


def test_he_keeps_the_port_of_rank_0(launch: Launch) -> None:
    """The job ends in words."""
    check_that_a_lost_port_is_told(launch)


def test_he_takes_the_port_where_addresses_are_translated(launch: Launch) -> None:
    """What he changes is found."""
    check_that_changes_are_found(launch)


def test_he_takes_the_port_where_nothing_is_authenticated(launch: Launch) -> None:
    """So the attack is one."""
    check_that_he_changes_an_object(launch)


def test_he_floods_every_port(launch: Launch) -> None:
    """On both hosts: he is let in nowhere, and the job goes on."""
    check_a_flood(launch)
