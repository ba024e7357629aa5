"""What the servers before this one left in the directory: epochs that somebody may still map."""

from __future__ import annotations

from gms import journal, names
from gms.core.events import EpochPhase
from gms.core.state import Epoch


def left_behind(directory: str, device: str, tag: str) -> list[Epoch]:
    """The epochs of earlier servers of `device`, by their files; the journal knows more of one.

    Staging epochs are among them: a writer may outlive its server by a moment, and for that moment
    its memory is in use. An epoch whose processes are all gone is found free at the first look.
    This is where a later version asks survivors for the journalled epoch.
    """
    record = journal.read(names.journal_path(directory, device, tag))
    ids = names.epochs_on_disk(directory, device, tag)
    if record is not None and record.epoch not in ids:
        ids.append(record.epoch)
    orphans = {id_: Epoch(id_, EpochPhase.ORPHANED) for id_ in ids}
    if record is not None:
        known = orphans[record.epoch]
        known.slab_sizes = list(record.slab_sizes)
        known.layout_hash, known.identity = record.layout_hash, record.identity
    return list(orphans.values())
