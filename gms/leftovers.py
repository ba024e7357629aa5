"""What the servers before this one left in the directory: epochs that somebody may still map."""

from __future__ import annotations

from gms import names
from gms.core.events import EpochPhase, JournalRecord
from gms.core.state import Epoch


def left_behind(directory: str, device: str, tag: str, record: JournalRecord | None) -> list[Epoch]:
    """The epochs of earlier servers of `device`, by their files; the journal knows one of them.

    Staging epochs are among them: a writer may outlive its server by a moment, and for that moment
    its memory is in use. An epoch whose processes are all gone is found free at the first look; the
    journalled one is expected back from whoever still maps it.
    """
    ids = names.epochs_on_disk(directory, device, tag)
    if record is not None and record.epoch not in ids:
        ids.append(record.epoch)
    orphans = {id_: Epoch(id_, EpochPhase.ORPHANED) for id_ in ids}
    if record is not None:
        known = orphans[record.epoch]
        # Its slabs are not known before it is back; for the books it is one piece until then.
        known.slab_sizes = [record.size_bytes]
        known.expected = record
    return list(orphans.values())
