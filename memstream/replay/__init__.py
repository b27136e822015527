"""Log streams: read with constant memory, point at what is surprising, remember all of it."""

from memstream.replay.config import ReplayConfig
from memstream.replay.events import Alert, Answer, Event, Found, IncidentCount, Note, PastIncident, Record, Summary
from memstream.replay.lines import LineMemory
from memstream.replay.pipeline import Replay
from memstream.replay.scores import Scores, combined

__all__ = [
    "Alert",
    "Answer",
    "Event",
    "Found",
    "IncidentCount",
    "LineMemory",
    "Note",
    "PastIncident",
    "Record",
    "Replay",
    "ReplayConfig",
    "Scores",
    "Summary",
    "combined",
]
