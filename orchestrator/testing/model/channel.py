"""What the other configurations take for granted: between two incarnations that live, sequenced messages arrive once
and in order. Here `protocols.channel.Channel` itself is explored over a network that loses, repeats and reorders.

One direction, as both are alike: the near end posts, the far end receives and acknowledges. Frames in flight are a bag:
any of them may arrive next, be lost, or be there twice.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from orchestrator.testing.model.explore import Result
from protocols.channel import Channel
from protocols.messages import Abort

MESSAGES = 3
FRAMES = 3

Frame = tuple[str, int]
"""(``message`` or ``ack``, its number)"""
Key = tuple[object, ...]
Step = tuple[str, "World"]


@dataclass(slots=True)
class World:
    """Both ends and what is between them."""

    near: Channel
    far: Channel
    posted: int = 0
    processed: list[int] = field(default_factory=list)
    frames: tuple[Frame, ...] = ()

    def copied(self, rng: random.Random) -> World:
        return copy.deepcopy(self, {id(rng): rng})

    def unacknowledged(self) -> tuple[int, ...]:
        return tuple(message.seq for message in self.near.take_due(math.inf))

    def key(self) -> Key:
        held = tuple(seq for seq in range(self.far.ack + 1, MESSAGES + 1) if not copy.copy(self.far).wants(seq))
        owed = self.far.ack_owed
        return self.posted, tuple(self.processed), self.frames, self.unacknowledged(), self.far.ack, held, owed


def explore_channel() -> Result:
    """Every order of posting, sending, losing, repeating and delivering, within the bounds."""
    rng = random.Random(0)
    result = Result("channel")
    began = time.process_time()
    start = World(Channel(rng), Channel(rng))
    worlds = [start]
    numbers = {start.key(): 0}
    sources: list[list[int]] = [[]]
    ends: list[int] = []
    at = 0
    while at < len(worlds):
        world = worlds[at]
        text = broken(world)
        if text:
            result.violation = text
            break
        result.most_in_flight = max(result.most_in_flight, len(world.frames))
        if len(world.processed) == MESSAGES and world.near.unacked == 0 and not world.frames:
            ends.append(at)
        for after in _steps(world, rng):
            key = after.key()
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = len(worlds)
                worlds.append(after)
                sources.append([])
            sources[number].append(at)
            result.transitions += 1
        at += 1
    result.states, result.ends = len(worlds), len(ends)
    if not result.violation and _reaching(ends, sources) != len(worlds):
        result.violation = "a message can be left for ever"
    result.seconds = time.process_time() - began
    return result


def broken(world: World) -> str:
    """What does not hold; empty when all does."""
    if world.processed != list(range(1, len(world.processed) + 1)):
        return f"messages were processed as {world.processed}"
    lost = set(range(len(world.processed) + 1, world.posted + 1)) - set(world.unacknowledged())
    return f"messages {sorted(lost)} were never processed and are not sent again" if lost else ""


def _steps(world: World, rng: random.Random) -> Iterator[World]:
    if world.posted < MESSAGES:
        after = world.copied(rng)
        after.posted += 1
        after.near.post(Abort(room=0, gen=after.posted, origin="decode", reason=""), 0.0)
        yield after
    if len(world.frames) < FRAMES:
        for seq in world.unacknowledged():  # it sends all of them; the network loses the others
            yield _with_frames(world, rng, (*world.frames, ("message", seq)))
        if world.far.ack_owed:
            after = _with_frames(world, rng, (*world.frames, ("ack", world.far.ack)))
            after.far.ack_owed = False
            yield after
        for frame in set(world.frames):
            yield _with_frames(world, rng, (*world.frames, frame))
    for frame in set(world.frames):
        rest = list(world.frames)
        rest.remove(frame)
        yield _with_frames(world, rng, tuple(rest))
        after = _with_frames(world, rng, tuple(rest))
        kind, number = frame
        if kind == "ack":
            after.near.acked(number)
        else:
            message = Abort(room=0, gen=number, origin="decode", reason="")
            after.processed += [ready.gen for ready in after.far.receive(number, message) if isinstance(ready, Abort)]
        yield after


def _with_frames(world: World, rng: random.Random, frames: tuple[Frame, ...]) -> World:
    after = world.copied(rng)
    after.frames = tuple(sorted(frames))
    return after


def _reaching(ends: list[int], sources: list[list[int]]) -> int:
    reached = set(ends)
    queue = list(ends)
    while queue:
        for source in sources[queue.pop()]:
            if source not in reached:
                reached.add(source)
                queue.append(source)
    return len(reached)
