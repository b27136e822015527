"""Log streams: read with constant memory, point at what is surprising, remember all of it."""

from memstream.replay.events import Alert, Answer, Event, Found, IncidentCount, Summary
from memstream.replay.lines import LineMemory
from memstream.replay.pipeline import Replay

__all__ = ["Alert", "Answer", "Event", "Found", "IncidentCount", "LineMemory", "Replay", "Summary"]
