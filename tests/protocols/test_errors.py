import copy
import pickle
import re

import pytest

from protocols import errors
from protocols.errors import KvferryError, RefusedError


def drawn() -> dict[str, tuple[str, ...]]:
    """The tree of the module's docstring: each class with its ancestors, nearest last."""
    tree: dict[str, tuple[str, ...]] = {}
    path: list[str] = []
    assert errors.__doc__ is not None
    for line in errors.__doc__.splitlines():
        found = re.match(r"^    ([│├└── ]*)(\w+Error)\b", line)
        if found:
            depth = len(found[1]) // 4
            path = [*path[:depth], found[2]]
            tree[found[2]] = tuple(path[:-1])
    return tree


def defined() -> dict[str, tuple[str, ...]]:
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, KvferryError)]
    return {
        each.__name__: tuple(base.__name__ for base in reversed(each.__mro__[1:]) if issubclass(base, KvferryError))
        for each in classes
    }


def test_the_tree_is_as_drawn() -> None:
    assert len(drawn()) > 10
    assert drawn() == defined()


def test_local_remote_and_transfer_are_apart() -> None:
    for name, ancestors in defined().items():
        assert len({"LocalError", "RemoteError", "TransferError"} & {name, *ancestors}) <= 1
    assert all(cls.__doc__ for cls in vars(errors).values() if isinstance(cls, type))


@pytest.mark.parametrize(
    "error, text",
    [
        (KvferryError("it broke"), "it broke"),
        (KvferryError("it broke", room=7, gen=1), "it broke (room=7, gen=1)"),
        (KvferryError("it broke", hint="Mend it."), "it broke. Mend it."),
        (KvferryError("it broke", hint="Mend it.", room=7), "it broke (room=7). Mend it."),
        (
            RefusedError("the buffers differ", **{"k[0]": "only on the prefill"}),
            "the buffers differ (k[0]=only on the prefill)",
        ),
    ],
)
def test_the_text_is_built_from_the_data(error: KvferryError, text: str) -> None:
    assert str(error) == text


def test_the_data_can_be_read() -> None:
    error = KvferryError("it broke", hint="Mend it.", room=7)
    assert (error.what, error.hint, dict(error.data)) == ("it broke", "Mend it.", {"room": 7})
    assert error.args == ("it broke",)


@pytest.mark.parametrize("twin", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_copies_keep_the_data(twin: object) -> None:
    assert callable(twin)
    error = twin(RefusedError("no", hint="Mend it.", room=7))
    assert type(error) is RefusedError
    assert str(error) == "no (room=7). Mend it."
