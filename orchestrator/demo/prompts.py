"""The prompts the demo runs when it is given none: a short one, and one long enough to be prefilled in chunks."""

from __future__ import annotations

from typing import NamedTuple


class Prompt(NamedTuple):
    """What is asked, and a short name for the tables."""

    name: str
    text: str


SHORT = Prompt("short", "Which three colours do painters mix all the others from?")

LONG = Prompt(
    "long",
    """Read the following report and then answer the question below it.

The old cable ferry at the narrows has carried carts, cattle and letters across the river for longer than anybody in
the two villages can remember. It is a flat wooden deck on two hulls, drawn along a steel cable by a winch that a
single person can turn. The river is only two hundred metres wide there, but the current is strong, and in spring the
water rises so fast that the landing stages are hinged and follow it up and down. A crossing takes eleven minutes when
the deck is full, and seven when it is empty.

For most of those years the rule was simple. The whole load had to be ready at the landing before the ferry left. If a
farmer came with thirty sacks of grain, the ferryman waited until the last sack had been weighed, written into the
book and carried on board. Then the cable tightened and the deck moved. On the other side the miller stood with his
arms crossed, because he could not begin to grind until the deck arrived, and so the mill stood still all morning.
People grumbled, but the rule had a good reason. Once, long ago, a deck had left half loaded, the book said thirty
sacks, and only twenty-two came off. Nobody could say where the other eight had gone, and the quarrel lasted for two
winters.

The present ferrywoman, whose grandmother had kept that book, thought about it differently. Weighing one sack takes a
minute. Carrying it across in the small boat takes less than a minute. There was no need for the small boat to lie at
the landing while the scale was busy. So she tied a numbered tag to every sack as it came off the scale, and the boat
took each small group of sacks over while the next group was being weighed. The miller had a list with the same
numbers. He crossed out each number when the sack was in his hands, not when it was promised, and he did not start the
stones until every number on his list was crossed out exactly once. If a number was missing, he said so at once and
named it. If a number came twice, he stopped as well, because a sack that comes twice has taken the place of one that
did not.

The change was small, but the mornings became short. When the last sack had been weighed, nearly all of the others
were already on the far bank, and only the last few had to follow. The miller began to grind almost as soon as the
farmer had paid. The ferrywoman did not row any faster than before, and the river was as wide as ever. She had only
stopped waiting when there was nothing to wait for.

There were some troubles to solve first. One day the wind held the boat in the middle of the river, and the farmer,
believing his sacks lost, asked for the same places on the shelf to be given to his neighbour. The ferrywoman refused.
As long as the boat was out there, she said, its sacks could still arrive, and then two families would own one place.
The shelf stayed empty until the boat had come back and she had counted what was in it. Another day the scale was
wrong, and a group of sacks was sent that had not been weighed at all. After that she never let the boat take a sack
before its tag was tied, and the tag was tied only when the scale had come to rest. She also painted the empty shelf
places bright red, so that a place where nothing had arrived could never be mistaken for a place with a sack of pale
flour in it.

In the second summer the council of the two villages sent a clerk to compare the old way with the new one. He was
careful. He let both ways carry the same grain on the same day, one after the other, several times, and changed the
order each time because the wind changed too. He wrote down when the last sack left the scale and when the miller was
able to begin, and called the time between the two the idle time of the mill. With the old way it was eleven minutes,
and with the new way it was less than one. He noted, fairly, that on a day without wind, when the small boat flew
across, the gain could hardly be seen, and that it was on the slow days, with the current against them, that it
mattered most.

Question: In two or three sentences, what did the ferrywoman change, and why does the miller wait until every number
is crossed out exactly once?""",
)

DEFAULT = (SHORT, LONG)
