"""What the servers before this one left in the directory: epochs that somebody may still map."""

from __future__ import annotations

import os

from gms import epoch_file, names
from gms.core.events import JournalRecord
from gms.core.recovery import orphans_of
from gms.core.state import Epoch


def left_behind(directory: str, device: str, tag: str, record: JournalRecord | None) -> list[Epoch]:
    """The epochs of earlier servers of `device`, by their files; the journal knows one of them.

    Staging epochs are among them: a writer may outlive its server by a moment, and for that moment
    its memory is in use. An epoch whose processes are all gone is found free at the first look; the
    journalled one is expected back from whoever still maps it.
    """
    ids = names.epochs_on_disk(directory, device, tag)
    paths = {id_: os.path.join(directory, names.epoch_file(device, id_, tag)) for id_ in ids}
    history = {id_ for id_, path in paths.items() if epoch_file.is_history(path)}
    return orphans_of(ids, record, history)
