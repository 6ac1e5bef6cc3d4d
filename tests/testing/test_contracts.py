"""Every collector of the library passes the contract of collectors."""

from __future__ import annotations

import subprocess
import sys

import collectors


class TestCollector(collectors.CollectorCase):
    """Vector environments, in chunks."""


class TestCollectorStepByStep(collectors.CollectorStepByStepCase):
    """Vector environments, a step at a time."""


class TestCollectorOfCopies(collectors.CollectorOfCopiesCase):
    """Vector environments that write to their arrays again."""


class TestEnvironmentList(collectors.EnvironmentListCase):
    """Single environments, one or many."""


class TestEnvironmentListStepByStep(collectors.EnvironmentListStepByStepCase):
    """Single environments, a step at a time."""


class TestAsyncCollector(collectors.AsyncCollectorCase):
    """Environments in processes, each stepped when it is ready."""


class TestWorkers(collectors.WorkersCase):
    """Workers, one agent an environment."""


class TestWorkersCollect(collectors.WorkersCollectCase):
    """Workers that are asked for batches."""


class TestWorkersOfSeveral(collectors.WorkersOfSeveralCase):
    """Workers, several environments of one agent each."""


class TestMultiAgentCollector(collectors.MultiAgentCollectorCase):
    """Simultaneous agents and turn-based agents."""


class TestMultiAgentWorkers(collectors.MultiAgentWorkersCase):
    """Workers, several agents an environment."""


class TestMultiAgentWorkersCollect(collectors.MultiAgentWorkersCollectCase):
    """Workers that are asked for batches, several agents an environment."""


def test_contracts_need_no_pytest() -> None:
    use = "import samplebatch.testing as testing; testing.CollectorContract, testing.MultiAgentContract"
    code = f"import sys; {use}; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
