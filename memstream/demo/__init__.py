"""A scripted conversation of our own: facts a person tells once, and small talk that fills the window in between."""

from memstream.demo.facts import KINDS, MOST_FACTS, Fact, facts
from memstream.demo.script import acknowledgements, exchanges

__all__ = ["KINDS", "MOST_FACTS", "Fact", "acknowledgements", "exchanges", "facts"]
