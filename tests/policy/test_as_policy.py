"""`as_policy` calls functions, modules, spaces and policies of other libraries with their arguments."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from samplebatch import Batch, Collector
from samplebatch.errors import ColumnTypeError, PolicySpecError
from samplebatch.policy.as_policy import as_policy
from samplebatch.policy.random import RandomPolicy
from tests.optional import torch

OBS = np.arange(12, dtype=np.float32).reshape(3, 4)


def batch(obs: Any = OBS) -> Batch:
    return Batch(obs=obs, info=Batch())


def test_a_callable_on_batches_is_called_on_the_batch_and_its_state() -> None:
    recorded = []

    def policy(batch: Batch, state: Any = None) -> Batch:
        recorded.append((batch, state))
        return Batch(act=[0, 1, 0], state=np.ones((3, 2)), policy=Batch(logp=np.zeros(3)))

    original = batch()
    decided = as_policy(policy)(original, "before")
    assert recorded == [(original, "before")]
    assert decided["act"].tolist() == [0, 1, 0]
    assert decided["state"].shape == (3, 2)
    assert decided["policy"].logp.shape == (3,)


@pytest.mark.parametrize(
    "policy",
    [
        lambda batch: {"act": batch.obs[:, 0]},
        functools.partial(lambda scale, batch: Batch(act=batch.obs[:, 0] * scale), 1),
        lambda obs: obs[:, 0],
        lambda obs: list(obs[:, 0]),
        lambda o: o[:, 0],
        lambda state: state[:, 0],
        lambda info: info[:, 0],
        lambda obs: torch.from_numpy(obs)[:, 0],
        as_policy(lambda b: Batch(act=b.obs[:, 0]), takes="batch"),
        as_policy(lambda x: x[:, 0], takes="obs"),
        as_policy(lambda state: state[:, 0], takes="obs"),
        as_policy(lambda s: s[:, 0].long(), takes="tensor"),
        as_policy(lambda *args: args[0][:, 0], takes="obs"),
        as_policy(functools.partial(np.take, indices=0, axis=1), takes="obs"),
    ],
)
def test_functions_of_batches_and_of_observations(policy: Any) -> None:
    assert as_policy(policy)(batch())["act"].tolist() == [0.0, 4.0, 8.0]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        *(
            (policy, "must have a parameter for the observations, .* got none; .*takes='obs'")
            for policy in (lambda *args: args, lambda: 0, max)
        ),
        (lambda obs, hidden: obs, r"parameter 'hidden' of a policy .*takes=\('obs', 'state'\)"),
        (lambda batch, info, *, epsilon: batch, "parameter 'epsilon' of a policy must be called 'info' or 'state'"),
    ],
)
def test_parameters_with_unknown_names_are_rejected(policy: Any, message: str) -> None:
    with pytest.raises(PolicySpecError, match=message):
        as_policy(policy)
    with pytest.raises(PolicySpecError, match=message), Collector(policy, "CartPole-v1") as collector:
        collector.collect(n_step=1)


@pytest.mark.parametrize("takes", ["state", "obss", (), ("obs", "batch"), ("obs", "state", "state"), 7])
def test_unsupported_values_of_takes_are_rejected(takes: Any) -> None:
    with pytest.raises(PolicySpecError, match="`takes` must be 'obs', 'tensor' or 'batch', or a sequence"):
        as_policy(lambda obs: obs, takes=takes)
    with pytest.raises(PolicySpecError, match="`takes` must be None for a policy that is a space, got 'obs'"):
        as_policy(spaces.Discrete(2), takes="obs")


def test_annotations_select_the_first_argument() -> None:
    def of_tensors(whatever: torch.Tensor) -> torch.Tensor:
        assert isinstance(whatever, torch.Tensor)
        return whatever[:, 0].long()

    def of_arrays(whatever: np.ndarray) -> np.ndarray:
        return whatever[:, 0]

    def of_batches(whatever: Batch) -> Batch:
        return Batch(act=whatever.obs[:, 0])

    for policy in (of_tensors, of_arrays, of_batches):
        assert as_policy(policy)(batch())["act"].tolist() == [0, 4, 8]


@pytest.mark.parametrize("state", ["kept", None])
def test_the_state_is_passed_by_name_or_as_takes_specifies(state: Any) -> None:
    def by_name(obs: Any, *, state: Any) -> Any:
        return obs[:, 0], state

    def by_place(obs: Any, hidden: Any) -> Any:
        return obs[:, 0], hidden

    def by_place_alone(obs: Any, hidden: Any, /) -> Any:
        return obs[:, 0], hidden

    def with_an_option(obs: Any, epsilon: float = 0.5) -> Any:
        return obs[:, 0] + epsilon

    for policy in (by_name, *(as_policy(item, takes=("obs", "state")) for item in (by_place, by_place_alone))):
        decided = as_policy(policy)(batch(), state)
        assert decided["act"].tolist() == [0, 4, 8]
        assert decided["state"] is state
    assert as_policy(with_an_option)(batch(), state)["act"].tolist() == [0.5, 4.5, 8.5]


def test_infos_are_passed_by_name_or_as_takes_specifies() -> None:
    original = Batch(obs=OBS, info=Batch(level=np.arange(3)))
    recorded: list[Any] = []

    def of_obs(obs: Any, info: Any) -> Any:
        recorded.append((obs, info, None))
        return obs[:, 0]

    def of_batch(batch: Any, info: Any, state: Any) -> Any:
        recorded.append((batch.obs, info, state))
        return batch.obs[:, 0], state

    def by_place(observations: Any, memory: Any, output: Any) -> Any:
        recorded.append((observations, output, memory))
        return observations[:, 0], memory

    for policy in (of_obs, of_batch, as_policy(by_place, takes=("obs", "state", "info"))):
        assert as_policy(policy)(original, "kept")["act"].tolist() == [0, 4, 8]
    assert [(obs is OBS, info.level.tolist(), state) for obs, info, state in recorded] == [
        (True, [0, 1, 2], None),
        (True, [0, 1, 2], "kept"),
        (True, [0, 1, 2], "kept"),
    ]


def test_a_policy_that_was_adapted_learns_the_actions_from_the_collector() -> None:
    scores = np.array([[0.0, 2.0]])
    with Collector(as_policy(lambda s: scores, takes="obs"), "CartPole-v1") as collector:
        assert collector.collect(n_step=3).batch["actions"].tolist() == [1, 1, 1]


def test_collectors_find_the_methods_of_a_policy_that_was_adapted() -> None:
    class Noisy:
        def __call__(self, s: Any) -> Any:
            return np.zeros(len(s), int)

        def add_exploration_noise(self, act: Any, batch: Any) -> Any:
            return act + 1

        def map_action(self, act: Any) -> Any:
            return act % 2

    with Collector(as_policy(Noisy(), takes="obs"), "CartPole-v1", exploration_noise=True) as collector:
        assert collector.collect(n_step=3).batch["actions"].tolist() == [1, 1, 1]


class Net(torch.nn.Module):
    """Network that prefers action 1 if the second number is large."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([[0.0, 1.0], [5.0, 0.0], [0, 0], [0, 0]]).double())

    def forward(self, x: Any) -> Any:
        assert not torch.is_grad_enabled()
        return x @ self.weight


def test_a_module_gets_its_dtype_and_scores_become_actions() -> None:
    policy = as_policy(Net(), spaces.Discrete(2, start=5))
    assert policy(batch(np.array([[1, 0, 0, 0], [0, 1, 0, 0]], np.float32)))["act"].tolist() == [6, 5]


def test_integer_observations_are_passed_to_modules_as_integers() -> None:
    module = torch.nn.Embedding(6, 2)
    assert as_policy(module, spaces.Discrete(2))(batch(np.array([0, 5])))["act"].shape == (2,)


def test_a_module_may_accept_batches_and_states() -> None:
    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = torch.nn.GRUCell(4, 6)

        def forward(self, batch: Batch, state: Any = None, **kwargs: Any) -> Batch:
            hidden = self.cell(torch.from_numpy(batch.obs), state)
            return Batch(act=hidden.argmax(1) % 2, state=hidden)

    policy = as_policy(Recurrent())
    first = policy(batch())
    second = policy(batch(), first["state"])
    assert not second["state"].requires_grad
    assert not torch.equal(first["state"], second["state"])


def test_a_module_that_returns_scores_and_a_state() -> None:
    class Net(torch.nn.Module):
        def forward(self, obs: Any, state: Any = None, info: Any = None) -> Any:
            return obs[:, :2], 1 if state is None else state + 1

    decided = as_policy(Net(), spaces.Discrete(2))(batch(), 1)
    assert decided["act"].tolist() == [1, 1, 1]
    assert decided["state"] == 2


def test_nested_observations_are_passed_to_modules_as_tensors() -> None:
    class Net(torch.nn.Module):
        def forward(self, obs: Batch) -> Any:
            assert isinstance(obs.camera, torch.Tensor)
            return obs.camera + obs.arm.angle

    nested = Batch(camera=np.ones((3, 2)), arm=Batch(angle=np.full((3, 2), 2.0)))
    assert as_policy(Net(), spaces.Box(-1, 1, (2,)))(batch(nested))["act"].tolist() == [[3.0, 3.0]] * 3


def test_a_distribution_is_sampled_and_its_log_probability_recorded() -> None:
    class Gaussian(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.distributions.Normal(x[:, :2], 1.0)

    torch.manual_seed(1)
    decided = as_policy(Gaussian(), spaces.Box(-1, 1, (2,)))(batch())
    assert decided["act"].shape == (3, 2)
    assert not np.array_equal(decided["act"], OBS[:, :2])
    expected = decided["dist"].log_prob(torch.from_numpy(decided["act"])).sum(1)
    assert torch.allclose(decided["action_logp"], expected)

    categorical = as_policy(lambda obs: torch.distributions.Categorical(logits=torch.zeros(len(obs), 5)))
    assert categorical(batch())["action_logp"].tolist() == pytest.approx([-np.log(5)] * 3)


def test_scores_are_recognised_only_by_the_action_space() -> None:
    scores = np.array([[0.0, 2.0, 1.0]] * 3)
    assert as_policy(lambda obs: scores, spaces.Discrete(3))(batch())["act"].tolist() == [1, 1, 1]
    assert as_policy(lambda obs: scores, spaces.Box(-9, 9, (3,)))(batch())["act"] is scores
    assert as_policy(lambda obs: scores)(batch())["act"] is scores
    explicit = as_policy(lambda obs: {"act": np.ones(3, int)}, spaces.Discrete(3))
    assert explicit(batch())["act"].tolist() == [1, 1, 1]


def test_a_batch_of_another_library_is_accepted() -> None:
    tianshou = pytest.importorskip("tianshou.data")
    decided = as_policy(lambda batch: tianshou.Batch(act=np.arange(3), state=np.zeros((3, 1))))(batch())
    assert decided["act"].tolist() == [0, 1, 2]
    assert decided["state"].shape == (3, 1)


def test_actions_of_several_parts() -> None:
    space = spaces.Dict(steer=spaces.Box(-1, 1, (2,)), gears=spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)]))

    def parts(obs: Any) -> dict[str, Any]:
        return {"steer": torch.zeros(3, 2), "gears": (np.zeros(3, int), [1, 1, 2])}

    act = as_policy(parts, space)(batch())["act"]
    assert act.steer.shape == (3, 2)
    assert act.gears["1"].tolist() == [1, 1, 2]
    same = as_policy(lambda obs: {"act": act}, space)(batch())["act"]
    assert same == act
    with pytest.raises(PolicySpecError, match=r"'gears\.0'"):
        as_policy(lambda obs: {"act": {"steer": np.zeros((3, 2))}}, space)(batch())


@pytest.mark.parametrize(
    ("policy", "words"),
    [(lambda obs: None, "got None"), (lambda obs: {"action": obs}, "got 'action'"), (lambda obs: {}, "got nothing")],
)
def test_a_policy_without_actions_is_rejected(policy: Any, words: str) -> None:
    with pytest.raises(PolicySpecError, match=words):
        as_policy(policy)(batch())


def test_objects_that_are_not_policies_are_rejected() -> None:
    with pytest.raises(PolicySpecError, match="a space or 'random', got 'randon'"):
        as_policy("randon")
    with pytest.raises(PolicySpecError, match="got the class Box"):
        as_policy(spaces.Box)


def test_random_draws_from_the_action_space() -> None:
    acts = as_policy("random", spaces.Discrete(2, start=5), seed=3)(batch())["act"]
    assert set(acts.tolist()) <= {5, 6}
    with pytest.raises(PolicySpecError, match="action_space must be a space for the policy 'random'"):
        as_policy("random")


def test_an_error_of_a_policy_has_a_note_about_its_argument() -> None:
    with pytest.raises(AttributeError) as caught:
        as_policy(lambda obs: obs.obs)(batch())
    assert "called with observations; `as_policy(policy, takes=...)`" in caught.value.__notes__[0]
    with pytest.raises(PolicySpecError) as refused:
        as_policy(lambda batch: batch + 1)(batch())
    assert "called with a Batch" in refused.value.__notes__[0]


SPACES = [
    spaces.Discrete(4, start=-2),
    spaces.MultiDiscrete([[2, 3], [4, 5]]),
    spaces.MultiBinary((2, 3)),
    spaces.Box(np.array([-1.0, 5.0]), np.array([1.0, 6.0]), dtype=np.float64),
    spaces.Box(np.array([-1.0, -np.inf, 3.0, -np.inf]), np.array([1.0, np.inf, np.inf, -3.0]), dtype=np.float64),
    spaces.Box(250, 255, (3,), np.uint8),
    spaces.Text(5),
    spaces.Dict(a=spaces.Discrete(2), b=spaces.Tuple([spaces.Box(0, 1, (2,)), spaces.Discrete(3)])),
]


def unbatched(actions: Any, row: int) -> Any:
    """Return one row in the form of the space."""
    if isinstance(actions, Batch):
        parts = {name: unbatched(part, row) for name, part in Batch.items(actions)}
        return tuple(parts.values()) if "0" in parts else parts
    return actions[row]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_random_actions_are_in_the_space_and_depend_only_on_the_seed(space: Any) -> None:
    before = space.np_random.bit_generator.state
    sampled = RandomPolicy(space, seed=1)(batch(np.zeros((200, 2)))).act
    for row in range(200):
        assert space.contains(unbatched(sampled, row))
    again = RandomPolicy(space, seed=1).sample(200)
    other = RandomPolicy(space, seed=2).sample(200)
    assert str(unbatched(sampled, slice(None))) == str(unbatched(again, slice(None)))
    assert str(unbatched(sampled, slice(None))) != str(unbatched(other, slice(None)))
    assert space.np_random.bit_generator.state == before


def test_random_actions_are_uniform() -> None:
    sample = RandomPolicy(spaces.Discrete(4, start=-2), seed=0).sample(8000)
    assert np.allclose(np.unique(sample, return_counts=True)[1] / 8000, 0.25, atol=0.02)
    box = RandomPolicy(spaces.Box(-2.0, 6.0, (1,)), seed=0).sample(8000)
    assert abs(box.mean() - 2.0) < 0.1
    assert box.min() < -1.9
    assert box.max() > 5.9


def test_random_actions_follow_nested_observations() -> None:
    nested = batch(Batch(a=Batch(b=np.zeros((7, 2)))))
    assert as_policy(spaces.Discrete(2), seed=0)(nested)["act"].shape == (7,)


class _TwoLayers(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Network whose actions have two parts; records the dtype of observations."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        self.dtype: Any = None

    def forward(self, obs: Any) -> Any:
        self.dtype = obs.dtype
        return self.body(obs)


def test_observations_get_the_current_dtype_of_the_parameters() -> None:
    module = _TwoLayers()
    policy, observed = as_policy(module), batch(np.zeros((5, 3)))
    for change, dtype in (
        (lambda: None, torch.float32),
        (lambda: module.double(), torch.float64),
        (lambda: setattr(module, "body", torch.nn.Linear(3, 2)), torch.float32),
        (lambda: module.half(), torch.float16),
        (lambda: setattr(module, "body", torch.nn.Sequential(torch.nn.Linear(3, 2).double())), torch.float64),
        (lambda: setattr(module, "body", torch.nn.Identity()), torch.float64),
    ):
        change()
        policy(observed)
        assert module.dtype == dtype


def test_observations_of_strings_are_rejected_as_tensors() -> None:
    with pytest.raises(ColumnTypeError, match="observations must be numbers to become tensors, got <U3"):
        as_policy(_TwoLayers()).decide(np.array(["cat", "dog"]))
