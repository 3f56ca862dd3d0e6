"""The folder in which `shoal run` is started, as in the tests of local mode."""

from cli.local.conftest import bench as bench  # noqa: PLC0414 - a fixture
