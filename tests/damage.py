"""Ways in which a plan file may be damaged: on its way, by a merge, by an editor, by a program that means well."""

from __future__ import annotations

import copy
import json
import random
from typing import Any, Callable, Iterator, Optional

ODD = (None, -1, 0, 3, 10**12, 10**400, 0.5, 1e300, True, False, "", "x", "home", "\ud800", [], [1], [[]], {},
       {"op": "train"}, [None])
SECTIONS = ("setup", "steps", "before", "body")
DEGREES = ("ranks", "tp", "pp", "dp", "first")
IDS = ("expr", "prompts", "response", "objective", "partial")
Place = tuple[Any, ...]


def places(value: Any, path: Place = ()) -> Iterator[Place]:
    """The path of every value inside, but for the format and digest of the file."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if path or key not in ("format", "digest"):
            yield (*path, key)
            yield from places(inner, (*path, key))


def at(value: Any, path: Place) -> Any:
    for key in path:
        value = value[key]
    return value


def put(value: Any, path: Place, new: Any) -> None:
    at(value, path[:-1])[path[-1]] = new


def step_lists(value: dict) -> Iterator[list]:
    """Every list of steps: of the plan, of its loops and its evaluations."""
    for place in places(value):
        inner = at(value, place)
        if place[-1] in SECTIONS and isinstance(inner, list) and inner:
            yield inner


def _pick(draw: random.Random, value: dict, wanted: Callable[[Place, Any], bool]) -> Optional[Place]:
    found = [place for place in places(value) if wanted(place, at(value, place))]
    return draw.choice(found) if found else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# ---- damages: each changes `value` in place, where there is something to change --------------------

def drop_field(draw: random.Random, value: dict) -> None:
    place = draw.choice(list(places(value)))
    del at(value, place[:-1])[place[-1]]


def retype(draw: random.Random, value: dict) -> None:
    put(value, draw.choice(list(places(value))), copy.deepcopy(draw.choice(ODD)))


def number(draw: random.Random, value: dict) -> None:
    place = _pick(draw, value, lambda _, v: _is_number(v))
    old = at(value, place)
    put(value, place, draw.choice([old + 1, old - 1, old * 2, -old, 0, 1, old + 0.5, 10**18, 1e308]))


def reference(draw: random.Random, value: dict) -> None:
    """A name becomes another, one that is there or one that is not."""
    place = _pick(draw, value, lambda _, v: isinstance(v, str) and v)
    names = [*value["models"], *value["layouts"], *value["dims"], "home", "nowhere"]
    put(value, place, draw.choice(names))


def drop_step(draw: random.Random, value: dict) -> None:
    steps = draw.choice(list(step_lists(value)))
    del steps[draw.randrange(len(steps))]


def double_step(draw: random.Random, value: dict) -> None:
    steps = draw.choice(list(step_lists(value)))
    steps.insert(draw.randrange(len(steps) + 1), copy.deepcopy(draw.choice(steps)))


def swap_steps(draw: random.Random, value: dict) -> None:
    steps = draw.choice(list(step_lists(value)))
    i, j = draw.randrange(len(steps)), draw.randrange(len(steps))
    steps[i], steps[j] = steps[j], steps[i]


def degrees(draw: random.Random, value: dict) -> None:
    name = draw.choice(list(value["layouts"]))
    layout = value["layouts"][name]
    for axis in draw.sample(DEGREES, draw.randint(1, 3)):
        layout[axis] = draw.choice([0, 1, 2, 3, 4, 8, -1, layout.get(axis, 1) * 2])


def swap_layouts(draw: random.Random, value: dict) -> None:
    one, other = draw.choice(list(value["layouts"])), draw.choice(list(value["layouts"]))
    value["layouts"][one], value["layouts"][other] = value["layouts"][other], value["layouts"][one]


def move_group(draw: random.Random, value: dict) -> None:
    group = draw.choice(value["groups"])
    group[draw.choice(["first", "ranks"])] = draw.choice([0, 1, 2, 3, 5, -1])


def shift_id(draw: random.Random, value: dict) -> None:
    """An expression's id leads to another expression."""
    place = _pick(draw, value, lambda p, v: isinstance(v, int) and (p[-1] in IDS or p[-2:-1] == ("args",)))
    put(value, place, max(0, at(value, place) + draw.choice([-2, -1, 1, 2, 7])))


def swap_rows(draw: random.Random, value: dict) -> None:
    rows = value["exprs"]
    i, j = draw.randrange(len(rows)), draw.randrange(len(rows))
    rows[i], rows[j] = rows[j], rows[i]


def drop_row(draw: random.Random, value: dict) -> None:
    """The ids of all later expressions are one too high then."""
    del value["exprs"][draw.randrange(len(value["exprs"]))]


DAMAGES = (drop_field, retype, number, reference, drop_step, double_step, swap_steps, degrees, swap_layouts, move_group,
           shift_id, swap_rows, drop_row)


def damaged_text(draw: random.Random, text: str) -> str:
    """A file that was cut, or in which characters changed."""
    i = draw.randrange(len(text))
    length = draw.randint(1, 20)
    return draw.choice([
        lambda: text[:i], lambda: text[:i] + text[i + length:], lambda: text[:i] + draw.choice('{}[]",:0 \\x') + text[i + 1:],
        lambda: text[:i] + text[i:i + length] * 2 + text[i + length:], lambda: text.replace(": 1", ": NaN", 1),
        lambda: text + text[i:],
    ])()


def damaged(draw: random.Random, text: str) -> tuple[str, dict]:
    """(the name of the damage, the value of the file after it)"""
    value, how = json.loads(text), draw.choice(DAMAGES)
    how(draw, value)
    return how.__name__, value
