"""Stop strings as one automaton that reads the answer's text once (Aho and Corasick, 1975).

The state after a piece of text stands for the longest suffix of the text that begins some stop
string. So it tells two things at no further cost: whether a stop string ends here, and exactly how
many trailing characters could still become one and must be withheld.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The stop strings of one request, compiled. Immutable: all choices share it.

    ``strings`` are non-empty. States are integers, 0 is the start. ``match[state]`` is the stop
    string that ends at this state (the longest, when one ends within another); ``held[state]`` is
    the length of the longest suffix that is a true prefix of a stop string.
    """

    __slots__ = ("_children", "_fallback", "_first", "held", "match")

    START = 0

    def __init__(self, strings: Sequence[str]) -> None:
        children: list[dict[str, int]] = [{}]
        depth = [0]
        match: list[str | None] = [None]
        for string in strings:
            if not string:
                raise ValueError("a stop string is empty")
            state = self.START
            for char in string:
                following = children[state].get(char)
                if following is None:
                    following = len(children)
                    children[state][char] = following
                    children.append({})
                    depth.append(depth[state] + 1)
                    match.append(None)
                state = following
            match[state] = string

        # Breadth first, so that a state's fallback (its longest shorter suffix) is complete first.
        fallback = [0] * len(children)
        held = [0] * len(children)
        waiting = deque(children[self.START].values())
        for state in waiting:
            held[state] = depth[state] if children[state] else 0
        while waiting:
            state = waiting.popleft()
            for char, child in children[state].items():
                suffix = fallback[state]
                while suffix and char not in children[suffix]:
                    suffix = fallback[suffix]
                suffix = children[suffix].get(char, self.START)
                fallback[child] = suffix
                match[child] = match[child] or match[suffix]
                # A whole stop string that did not count is no longer a beginning of one.
                held[child] = depth[child] if children[child] else held[suffix]
                waiting.append(child)

        self._children = children
        self._fallback = fallback
        self._first = frozenset(children[self.START])
        self.held = held
        self.match = match

    def scan(self, state: int, text: str, armed: bool) -> tuple[int, int]:
        """Reads ``text`` from ``state`` on: the new state, and the number of characters of
        ``text`` up to and including the one that completes a stop string, 0 if none does.

        Several stop strings: the one that is complete first counts. When not ``armed``, matches
        are passed over.
        """
        if state == self.START and self._first.isdisjoint(text):
            return self.START, 0
        children, fallback, match = self._children, self._fallback, self.match
        for index, char in enumerate(text):
            following = children[state].get(char)
            while following is None and state:
                state = fallback[state]
                following = children[state].get(char)
            state = following or self.START
            if armed and match[state] is not None:
                return state, index + 1
        return state, 0
