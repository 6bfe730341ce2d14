"""The contract tests have their fixtures, wherever they are run from."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures, unless somebody has."""
    config.pluginmanager.import_plugin("cydist.testing.contract")
