"""Atari environments with preprocessing, frame stacking, episodes per life, fire on reset, and clipped rewards."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TransformReward

from samplebatch.arguments import whole
from samplebatch.env.registry import make_environment
from samplebatch.errors import EnvironmentSpecError, require

_FIRE = 1
"""The action FIRE of games in which it is the second one."""


def make_atari(
    name: str,
    *,
    frame_skip: int = 4,
    screen_size: int = 84,
    noop_max: int = 30,
    stack_num: int = 4,
    terminal_on_life_loss: bool = False,
    fire_on_reset: bool = True,
    clip_rewards: bool = False,
    **options: Any,
) -> Any:
    """Create an Atari environment whose observations are stacked greyscale frames, as in the DQN papers.

    Gymnasium's `AtariPreprocessing` skips, pools, converts and resizes frames (Machado et al., arXiv:1709.06009), and
    Gymnasium's `FrameStackObservation` stacks the frames. `terminal_on_life_loss` and `clip_rewards` are common in
    training (Mnih et al., Nature 518, 2015); evaluate without these options.

    Parameters
    ----------
    name
        Environment id, such as `ALE/Breakout-v5`.
    frame_skip, screen_size, noop_max
        Number of frames per step, width and height of images in pixels, and maximum number of no-op actions after a
        reset.
    stack_num
        Number of frames per observation. Observations have shape (stack_num, screen_size, screen_size) and dtype uint8,
        even if `stack_num` is 1.
    terminal_on_life_loss
        Whether the loss of a life terminates the episode; the next episode continues the game.
    fire_on_reset
        Whether to execute the action FIRE at the start of each episode and life, in games whose second action is FIRE.
    clip_rewards
        Whether to replace each reward by its sign: -1, 0 or 1.
    **options
        Arguments of `gymnasium.make`, such as `repeat_action_probability`, or `mode` and `difficulty`.

    Raises
    ------
    EnvironmentSpecError
        If the environment does not exist, or is not an Atari environment with image observations.
    MissingExtraError, ArgumentError
        If a package of the extra `atari` is not installed, or `stack_num` is not a positive integer.
    """
    require("cv2", "atari")
    stack_num = whole("stack_num", stack_num, 1)
    if not is_atari(name):
        raise EnvironmentSpecError(f"an Atari environment must have an id such as 'ALE/Breakout-v5', got {name!r}")
    # The frames are skipped here, one by one.
    env: Any = make_environment(name, {**options, "frameskip": 1})
    env = AtariPreprocessing(env, noop_max, frame_skip, screen_size)
    if terminal_on_life_loss:
        env = LifeEpisodes(env)
    if fire_on_reset and env.unwrapped.get_action_meanings()[_FIRE : _FIRE + 1] == ["FIRE"]:
        env = FireOnReset(env)
    if clip_rewards:
        env = TransformReward(env, _sign)
    return FrameStackObservation(env, stack_num)


def is_atari(name: Any) -> bool:
    """Return whether a name is the id of an Atari environment with image observations.

    >>> [is_atari(name) for name in ("ALE/Breakout-v5", "CartPole-v1", "ALE/Breakout-ram-v5")]
    [True, False, False]
    """
    return isinstance(name, str) and name.startswith("ALE/") and "-ram-" not in name


def _sign(reward: Any) -> float:
    return float((reward > 0) - (reward < 0))


class LifeEpisodes(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper in which the loss of a life terminates the episode, and the next episode continues the game."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._lives, self._is_over = 0, True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Continue the game with a no-op after a lost life; start a new game if the game ended or a seed is passed."""
        if self._is_over or seed is not None:
            start = self.env.reset(seed=seed, options=options)
        else:
            obs, _, terminated, truncated, info = self.env.step(0)
            start = self.env.reset(options=options) if terminated or truncated else (obs, info)
        self._lives, self._is_over = _count_lives(self), False
        return start

    def step(self, action: Any) -> Any:
        """Step the environment; terminate the episode if a life was lost."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._is_over = terminated or truncated
        before, self._lives = self._lives, _count_lives(self)
        return obs, reward, terminated or self._lives < before, truncated, info


class FireOnReset(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that executes the action FIRE at the start of each episode, and after a lost life within an episode.

    A policy that is trained with this wrapper does not learn to start a life with FIRE, so evaluate the policy with the
    wrapper, too.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset and fire."""
        self.env.reset(seed=seed, options=options)
        obs, _, terminated, truncated, info = self.env.step(_FIRE)
        start = self.env.reset(options=options) if terminated or truncated else (obs, info)
        self._lives = _count_lives(self)
        return start

    def step(self, action: Any) -> Any:
        """Step the environment; if a life was lost within an episode, also execute FIRE and add both rewards."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        before, self._lives = self._lives, _count_lives(self)
        if self._lives < before and not (terminated or truncated):
            obs, after, terminated, truncated, info = self.env.step(_FIRE)
            reward, self._lives = float(reward) + float(after), _count_lives(self)
        return obs, reward, terminated, truncated, info


def _count_lives(env: Any) -> int:
    return int(env.unwrapped.ale.lives())
