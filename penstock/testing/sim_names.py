"""Which file names survive a power cut: the folders of the simulated disk.

Two trees: the names as the running process sees them, and those that are durable. Between them
stands a list of changes, each durable once its folder is synced and otherwise kept or lost by the
dice at a crash, one by one: a later change may survive an earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.log.pages import Tree

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable
    from random import Random

    from penstock.testing.sim_inode import SimInode

Names = list[tuple[str, "SimInode | None"]]  # None: the name goes away


@dataclass(slots=True, eq=False)
class NameChange:
    """One unsynced change of names, durable with its folder: all of it or nothing."""

    folder: str
    names: Names


class SimNames:
    """The names of a simulated disk, live and durable.

    >>> from collections import Counter
    >>> from random import Random
    >>> from penstock.testing.sim_inode import SimInode
    >>> names = SimNames()
    >>> names.change("", [("a", SimInode(1))])
    >>> names.crash(Random(1), lost=1.0, counts=Counter()).live.has("a")
    False
    """

    def __init__(self) -> None:
        self.live: Tree[SimInode] = Tree()
        self._durable: Tree[SimInode] = Tree()
        self._pending: list[NameChange] = []

    def make(self, folder: str) -> None:
        """Make a folder; durable at once, as the `Disk` contract says."""
        self.live.make(folder)
        self._durable.make(folder)

    def change(self, folder: str, names: Names) -> None:
        """Set and remove names in one step, durable with the next sync of `folder`."""
        self._pending.append(NameChange(folder, names))
        _apply(self.live, names)

    def sync(self, folder: str) -> None:
        """Make the changes that belong to a folder durable."""
        for change in [change for change in self._pending if change.folder == folder]:
            self._settle(change)

    def crash(self, rng: Random, *, lost: float, counts: Counter[str]) -> SimNames:
        """The names that the next life finds."""
        for change in self._pending[:]:
            survives = rng.random() >= lost
            counts["kept_names" if survives else "lost_names"] += 1
            if survives:
                self._settle(change)
        after = SimNames()
        after._durable = self._durable
        after.live = self._durable.copy()
        return after

    def lose(self, path: str) -> SimInode:
        """Take a name away everywhere, the durable tree included."""
        inode = self.live.take(path)
        self._forget(path, len(self._pending))
        _apply(self._durable, [(path, None)])
        return inode

    def copy(self, twin_of: Callable[[SimInode], SimInode]) -> SimNames:
        """The same names for copies of the files."""
        twin = SimNames()
        for theirs, ours in ((self.live, twin.live), (self._durable, twin._durable)):
            for folder in theirs.folders():
                ours.make(folder)
            for path, inode in theirs.walk():
                ours.put(path, twin_of(inode))
        twin._pending = [
            NameChange(
                change.folder, [(path, node and twin_of(node)) for path, node in change.names]
            )
            for change in self._pending
        ]
        return twin

    def _settle(self, change: NameChange) -> None:
        position = self._pending.index(change)
        for path, _ in change.names:
            self._forget(path, position)
        _apply(self._durable, change.names)
        self._pending.pop(position)

    def _forget(self, path: str, position: int) -> None:
        # What came before on the same name must not come back after this.
        for change in self._pending[:position]:
            change.names = [(name, inode) for name, inode in change.names if name != path]


def _apply(tree: Tree[SimInode], names: Names) -> None:
    for path, inode in names:
        if inode is not None:
            tree.put(path, inode)
        elif tree.has(path):
            tree.take(path)
