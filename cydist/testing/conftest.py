"""Load the fixtures of the contract tests, from any working directory."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures, unless they are loaded."""
    config.pluginmanager.import_plugin("cydist.testing.contract")
