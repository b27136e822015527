"""Storing, finding and forgetting what was said. Importing it loads no model library."""

from memstream.memory.embedder import Embedder, SentenceTransformerEmbedder
from memstream.memory.handle import ConversationHandle
from memstream.memory.memory import Memory
from memstream.memory.packing import Recall
from memstream.memory.reranker import CrossEncoderReranker, Reranker
from memstream.memory.summarizer import Summarizer
from memstream.memory.verify import VerifyReport
from memstream.stores.base import Scope, storable_text
from memstream.stores.rows import ConversationInfo, Turn
from memstream.stores.sql import SqlStore

__all__ = [
    "ConversationHandle",
    "ConversationInfo",
    "CrossEncoderReranker",
    "Embedder",
    "Memory",
    "Recall",
    "Reranker",
    "Scope",
    "SentenceTransformerEmbedder",
    "SqlStore",
    "Summarizer",
    "Turn",
    "VerifyReport",
    "storable_text",
]
