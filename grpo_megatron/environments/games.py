"""Small games of several turns, without tools: the policy writes a move, the game shows its state.

Equal positions have equal states, so that turns of different episodes can be compared where they
meet (GiGPO, arXiv:2505.10978)."""

import math
import random
import re

from grpo_megatron.data.conversation import Message
from grpo_megatron.environments.protocol import Observation, Outcome, Reply, Step
from grpo_megatron.environments.registry import traits
from grpo_megatron.environments.tools import messages_with
from grpo_megatron.errors import EpisodeError
from grpo_megatron.types import Problem

# A minus behind a digit or a letter is a dash: 1-3 are two numbers.
_WHOLE_NUMBER = re.compile(r"(?:(?<!\w)[-−]|(?<![\w.]))\d{1,9}(?!\w|\.\d)")

_LARGEST_READ = 999_999_999


def _numbers(text: str) -> list[int]:
    return [int(found.replace("−", "-")) for found in _WHOLE_NUMBER.findall(text)]


def _randomness(game: str, problem: Problem, seed: int) -> random.Random:
    return random.Random(f"{game} {seed} {problem.question}")


def _check_positive(**arguments: int) -> None:
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise EpisodeError(f"{name} = {value!r}", remedy=f"set {name} to a number above 0")


def _check_penalty(value: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise EpisodeError(
            f"invalid_penalty = {value!r}",
            remedy="set invalid_penalty to what a turn without a move loses, 0 or more",
        )


class Game:
    """What both games share: moves are counted, and a game ends when it is won or out of moves.

    The turn that wins has the reward 1, others 0, a turn without a move `-invalid_penalty`. The
    outcome is 1 for a game that is won, else 0; its metrics are `moves` and `invalid_moves`."""

    def __init__(self, max_moves: int, invalid_penalty: float):
        self._max_moves = max_moves
        self._invalid_penalty = invalid_penalty
        self._num_moves = 0
        self._num_invalid = 0

    async def close(self) -> None:
        """Nothing is held."""

    def outcome(self, is_won: bool) -> Outcome:
        """Return the outcome of the game as it stands."""
        metrics = {"moves": float(self._num_moves), "invalid_moves": float(self._num_invalid)}
        return Outcome(float(is_won), metrics)

    def after_move(self, told: str, state: str, *, is_valid: bool, is_won: bool) -> Step:
        """Return the step of a turn that left the game in `state`."""
        self._num_moves += 1
        reward = float(is_won)
        if not is_valid:
            self._num_invalid += 1
            reward = -self._invalid_penalty
        done = is_won or self._num_moves >= self._max_moves
        messages: tuple[Message, ...] = ()
        if not done:
            messages = ({"role": "user", "content": told},)
        return Step(messages, reward, done, state, outcome=self.outcome(is_won))


@traits(check=lambda **arguments: LightsOut.check(**arguments))
class LightsOut(Game):
    """Lights of a square that a press switches together with their neighbours; all must go out.

    The board is `num_presses` random presses away from dark, so it can always be won."""

    def __init__(
        self,
        *,
        size: int = 3,
        num_presses: int = 2,
        max_moves: int = 8,
        invalid_penalty: float = 0.0,
    ):
        super().__init__(max_moves, invalid_penalty)
        self._size = size
        self._num_presses = num_presses
        self._lit: set[tuple[int, int]] = set()

    @staticmethod
    def check(
        *,
        size: int = 3,
        num_presses: int = 2,
        max_moves: int = 8,
        invalid_penalty: float = 0.0,
    ) -> None:
        """EpisodeError for a board that cannot be made, or a penalty that is none."""
        _check_penalty(invalid_penalty)
        _check_positive(size=size, num_presses=num_presses, max_moves=max_moves)
        if num_presses > size * size:
            raise EpisodeError(
                f"num_presses = {num_presses} of a board with {size * size} lights",
                remedy=f"set num_presses to at most {size * size}",
            )

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Make the board that seed and question decide."""
        places = []
        for row in range(1, self._size + 1):
            for column in range(1, self._size + 1):
                places.append((row, column))
        chosen = _randomness("lights_out", problem, seed).sample(places, self._num_presses)
        for place in chosen:
            self._press(place)
        if not self._lit:  # some presses undo one another
            self._press(chosen[0])
        rules = (
            f"The {self._size} x {self._size} board has lights that are on (1) or off (0). "
            "Pressing one switches it and its neighbours above, below, left and right. Switch all "
            "lights off. In each turn write one move: the row and the column to press, counted "
            f"from 1, for example: press 1 2\n\n{self._board}"
        )
        return Observation(messages_with(problem, rules), (), self._state, self.outcome(False))

    async def step(self, reply: Reply) -> Step:
        """Press what the last two numbers of the turn name."""
        numbers = _numbers(reply.text)[-2:]
        is_valid = len(numbers) == 2 and all(1 <= number <= self._size for number in numbers)
        if is_valid:
            self._press((numbers[0], numbers[1]))
            told = self._board
        else:
            told = (
                f"That is no move: write a row and a column from 1 to {self._size}, for example: "
                f"press 1 2\n\n{self._board}"
            )
        return self.after_move(told, self._state, is_valid=is_valid, is_won=not self._lit)

    def _press(self, place: tuple[int, int]) -> None:
        row, column = place
        near = {(row, column), (row - 1, column), (row + 1, column)}
        near |= {(row, column - 1), (row, column + 1)}
        inside = {(r, c) for r, c in near if 1 <= r <= self._size and 1 <= c <= self._size}
        self._lit ^= inside

    @property
    def _board(self) -> str:
        lines = []
        for row in range(1, self._size + 1):
            cells = [str(int((row, column) in self._lit)) for column in range(1, self._size + 1)]
            lines.append(" ".join(cells))
        return "\n".join(lines)

    @property
    def _state(self) -> str:
        return self._board.replace("\n", "/").replace(" ", "")


@traits(check=lambda **arguments: GuessNumber.check(**arguments))
class GuessNumber(Game):
    """A number from 1 to `largest`; each guess is told whether it is too low or too high.

    The state is the interval that the replies have left."""

    def __init__(self, *, largest: int = 100, max_moves: int = 10, invalid_penalty: float = 0.0):
        super().__init__(max_moves, invalid_penalty)
        self._largest = largest
        self._number = 0
        self._low = 1
        self._high = largest

    @staticmethod
    def check(*, largest: int = 100, max_moves: int = 10, invalid_penalty: float = 0.0) -> None:
        """EpisodeError for a game that cannot be played, or a penalty that is none."""
        _check_penalty(invalid_penalty)
        _check_positive(largest=largest, max_moves=max_moves)
        if largest > _LARGEST_READ:
            raise EpisodeError(
                f"largest = {largest}, and numbers of more than nine digits are not read in turns",
                remedy=f"set largest to at most {_LARGEST_READ}",
            )

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Return a number that seed and question decide."""
        self._number = _randomness("guess_number", problem, seed).randint(1, self._largest)
        rules = (
            f"I think of a whole number from 1 to {self._largest}. Guess it: write one number in "
            "each turn, and I say whether it is too low or too high."
        )
        return Observation(messages_with(problem, rules), (), self._state, self.outcome(False))

    async def step(self, reply: Reply) -> Step:
        """Compare the last number of the turn."""
        numbers = _numbers(reply.text)[-1:]
        is_valid = bool(numbers) and 1 <= numbers[0] <= self._largest
        is_won = is_valid and numbers[0] == self._number
        if not is_valid:
            told = f"That is no guess: write a whole number from 1 to {self._largest}."
        elif numbers[0] < self._number:
            told = f"{numbers[0]} is too low."
            self._low = max(self._low, numbers[0] + 1)
        else:
            told = f"{numbers[0]} is too high."
            self._high = min(self._high, numbers[0] - 1)
        if is_won:
            self._low = self._high = self._number
        return self.after_move(told, self._state, is_valid=is_valid, is_won=is_won)

    @property
    def _state(self) -> str:
        return f"{self._low}-{self._high}"
