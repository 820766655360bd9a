"""The checkpoints and the command of tests/cli, for the tests of conversions."""

from tests.cli.conftest import ckpt as ckpt
from tests.cli.conftest import ended_at as ended_at
from tests.cli.conftest import mine as mine
from tests.cli.conftest import ours as ours
from tests.cli.conftest import stock as stock
