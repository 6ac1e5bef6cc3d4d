"""Every collector of the library passes the contract of collectors."""

from __future__ import annotations

import subprocess
import sys

import collectors


class TestCollector(collectors.CollectorCase):
    """Vector environments, in chunks."""


class TestCollectorStepByStep(collectors.CollectorStepByStepCase):
    """Vector environments, one step per call."""


class TestCollectorOfCopies(collectors.CollectorOfCopiesCase):
    """Vector environments that reuse their arrays."""


class TestEnvironmentList(collectors.EnvironmentListCase):
    """One or several single environments."""


class TestEnvironmentListStepByStep(collectors.EnvironmentListStepByStepCase):
    """Single environments, one step per call."""


class TestAsyncCollector(collectors.AsyncCollectorCase):
    """Environments in processes, stepped as soon as they are ready."""


class TestWorkers(collectors.WorkersCase):
    """Workers, one agent per environment."""


class TestWorkersCollect(collectors.WorkersCollectCase):
    """Workers, batches requested with `collect`."""


class TestWorkersOfSeveral(collectors.WorkersOfSeveralCase):
    """Workers with several single-agent environments each."""


class TestMultiAgentCollector(collectors.MultiAgentCollectorCase):
    """Simultaneous agents and turn-based agents."""


class TestMultiAgentWorkers(collectors.MultiAgentWorkersCase):
    """Workers, several agents per environment."""


class TestMultiAgentWorkersCollect(collectors.MultiAgentWorkersCollectCase):
    """Workers, batches requested with `collect`, several agents per environment."""


def test_contracts_run_without_pytest() -> None:
    use = "import samplebatch.testing as testing; testing.CollectorContract, testing.MultiAgentContract"
    code = f"import sys; {use}; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
